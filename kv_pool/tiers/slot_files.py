"""`SlotFiles`: blocks in the slots of one file, their headers in another; detects partial writes.

    headers   | header 0 | header 1 | ...      128 bytes each; zeros for a slot without a block
    blocks    |  slot 0    |  slot 1    | ...  the bytes of a block, padded to a multiple of 4096

    header    magic, lengths of key and parent, bytes of the block, use, checksum of the block,
              key, parent and tokens of the prefix, checksum of these

A block is written before its header, and a header is wiped before its slot is written again. A valid header
therefore always describes a complete block, even if the process was killed. A crash of the machine can break
this order; the checksum of the block detects that.
"""

from __future__ import annotations

import contextlib
import os
from struct import Struct, error
from typing import NamedTuple

import numpy as np
import xxhash

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, SlotId
from kv_pool.regular_files import open_private
from kv_pool.tiers.block_rows import ByteRows

MAGIC = b"kvb1"
HEADER_BYTES = 128
MAX_KEY_BYTES = 88
# Without the checksum of the header itself, which follows.
# The length of the parent is one more than its bytes; 0 if unknown, too long, or written by an older version.
HEADER = Struct(f"<4sHHQQQ{MAX_KEY_BYTES}s")
CHECKSUM = Struct("<Q")
NUM_TOKENS = Struct("<I")
NO_HEADER = bytes(HEADER_BYTES)
_ALIGNMENT = 4096
_REWRITTEN_BYTES = 1024 * 1024

assert HEADER.size + CHECKSUM.size == HEADER_BYTES


class SlotHeader(NamedTuple):
    """The description of the block in a slot.

    Attributes:
        key: the block's key.
        use: a growing number; a block with a higher one was used later.
        checksum: xxh3_64 of the block's bytes.
        parent, num_tokens: see `LowerTiers.list_parents`.
    """

    key: BlockHashWithGroupId
    use: int
    checksum: int
    parent: bytes | None = None
    num_tokens: int = 0


class SlotFiles:
    """The two files of a disk tier, opened or created in a folder that this process has locked.

    Args:
        folder: file descriptor of the folder.
        block_bytes: size of an encoded block.

    Reads take no lock and change nothing. Threads may read while another thread writes; a read from a slot
    that is being written returns no block.
    Methods raise OSError if the operating system fails.
    """

    def __init__(self, folder: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        # False: headers may not be on the disk yet, including those written by an earlier process.
        self._is_synced = False
        self._must_rewrite = False
        self._stride = -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
        self._headers = open_private("headers", os.O_RDWR | os.O_CREAT, folder)
        with contextlib.ExitStack() as closing:
            closing.callback(os.close, self._headers)
            self._blocks = open_private("blocks", os.O_RDWR | os.O_CREAT, folder)
            closing.pop_all()

    def write(
        self,
        slot: SlotId,
        key: BlockHashWithGroupId,
        block: ByteRows,
        use: int,
        parent: bytes | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Write a block and its header into an empty slot.

        Args:
            block: (block_bytes,) uint8, contiguous.
            use, parent, num_tokens: see `SlotHeader`.
        Raises:
            OSError: for example, the disk is full. The slot is empty.
        """
        checksum = xxhash.xxh3_64_intdigest(block.data)
        _write_all(self._blocks, block.data, slot * self._stride)
        try:
            self.write_header(slot, SlotHeader(key, use, checksum, parent, num_tokens))
        except OSError:
            with contextlib.suppress(OSError):  # a partial header is invalid by its checksum
                self.wipe(slot)
            raise

    def write_header(self, slot: SlotId, header: SlotHeader) -> None:
        """Write the header of a slot. A header never crosses a page of the file."""
        key = header.key
        names: bytes = key
        parent_bytes = 0
        if header.parent is not None and header.num_tokens > 0:
            names = key + header.parent + NUM_TOKENS.pack(header.num_tokens)
            if len(names) <= MAX_KEY_BYTES:
                parent_bytes = len(header.parent) + 1
            else:
                names = key
        packed = HEADER.pack(
            MAGIC, len(key), parent_bytes, self.block_bytes, header.use, header.checksum, names
        )
        packed += CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))
        self._is_synced = False
        _write_all(self._headers, memoryview(packed), slot * HEADER_BYTES)

    def wipe(self, slot: SlotId) -> None:
        """Empty a slot. Until `sync` returns, a crash of the machine may bring its block back."""
        self._is_synced = False
        _write_all(self._headers, memoryview(NO_HEADER), slot * HEADER_BYTES)

    def wipe_all(self) -> None:
        """Empty all slots for good. Both files are empty afterwards."""
        self._is_synced = False
        os.ftruncate(self._headers, 0)
        self.sync()
        with contextlib.suppress(OSError):  # blocks without headers are never found
            os.ftruncate(self._blocks, 0)

    def sync(self) -> None:
        """Wait until all headers are on the disk. No-op if they are.

        After a failed fsync the operating system marks the unwritten pages as clean. Therefore the next call
        writes all headers again.
        """
        if self._is_synced:
            return
        if self._must_rewrite:
            self._rewrite_headers()
        self._must_rewrite = True
        os.fsync(self._headers)
        self._must_rewrite = False
        self._is_synced = True

    def _rewrite_headers(self) -> None:
        offset = 0
        while chunk := os.pread(self._headers, _REWRITTEN_BYTES, offset):
            _write_all(self._headers, memoryview(chunk), offset)
            offset += len(chunk)

    def read_header(self, slot: SlotId) -> SlotHeader | None:
        """Return the header of a slot; None if the slot is empty or its header is invalid."""
        return self._parse(os.pread(self._headers, HEADER_BYTES, slot * HEADER_BYTES))

    def read(self, slot: SlotId, into: ByteRows) -> SlotHeader | None:
        """Read the block in a slot and verify its checksum.

        Args:
            into: (block_bytes,) uint8, contiguous. Its content is undefined if the result is None.
        Returns:
            The header of the block; None if the slot is empty or the block is damaged.
        """
        header = self.read_header(slot)
        if header is None or not self._read_block(slot, into):
            return None
        return header if xxhash.xxh3_64_intdigest(into.data) == header.checksum else None

    def list_headers(self, num_slots: int) -> tuple[list[tuple[SlotId, SlotHeader]], int]:
        """Return (slot, header) for each block in the first `num_slots` slots, and the count of bad headers.

        Bad headers are wiped. A header whose block lies beyond the end of its file is bad. Both files are
        truncated to `num_slots` slots.
        """
        for file, stride in ((self._headers, HEADER_BYTES), (self._blocks, self._stride)):
            if os.fstat(file).st_size > num_slots * stride:
                os.ftruncate(file, num_slots * stride)
        num_bytes = os.fstat(self._blocks).st_size
        found: list[tuple[SlotId, SlotHeader]] = []
        num_bad = 0
        first = 0
        while chunk := os.pread(self._headers, 8192 * HEADER_BYTES, first * HEADER_BYTES):
            num_whole = len(chunk) // HEADER_BYTES
            rows = np.frombuffer(chunk, np.uint8, num_whole * HEADER_BYTES).reshape(num_whole, HEADER_BYTES)
            for place in np.flatnonzero(rows.any(axis=1)).tolist():
                slot = SlotId(first + place)
                header = self._parse(rows[place].tobytes())
                if header is None or slot * self._stride + self.block_bytes > num_bytes:
                    num_bad += 1
                    self.wipe(slot)
                else:
                    found.append((slot, header))
            first += num_whole
            if num_whole * HEADER_BYTES != len(chunk):  # the file ends inside a header
                num_bad += 1
                os.ftruncate(self._headers, first * HEADER_BYTES)
        return found, num_bad

    def close(self) -> None:
        """Close both files."""
        os.close(self._headers)
        os.close(self._blocks)

    def _parse(self, packed: bytes) -> SlotHeader | None:
        try:
            magic, key_bytes, parent_bytes, block_bytes, use, checksum, names = HEADER.unpack_from(packed)
            (of_header,) = CHECKSUM.unpack_from(packed, HEADER.size)
        except error:  # truncated
            return None
        if magic != MAGIC or block_bytes != self.block_bytes or key_bytes > MAX_KEY_BYTES:
            return None
        if xxhash.xxh3_64_intdigest(packed[: HEADER.size]) != of_header:
            return None
        key = BlockHashWithGroupId(names[:key_bytes])
        end = key_bytes + parent_bytes - 1
        if not parent_bytes or end + NUM_TOKENS.size > MAX_KEY_BYTES:
            return SlotHeader(key, use, checksum)
        (num_tokens,) = NUM_TOKENS.unpack_from(names, end)
        return SlotHeader(key, use, checksum, names[key_bytes:end], num_tokens)

    def _read_block(self, slot: SlotId, into: ByteRows) -> bool:
        left = into.data
        offset = slot * self._stride
        while len(left):
            num_read = os.preadv(self._blocks, [left], offset)
            if not num_read:
                return False
            left = left[num_read:]
            offset += num_read
        return True


def check_key(key: BlockHashWithGroupId) -> None:
    """Raise InvalidArgumentError for a key that does not fit into a header."""
    if len(key) > MAX_KEY_BYTES:
        raise InvalidArgumentError(f"a key has {len(key)} bytes; a DiskTier takes at most {MAX_KEY_BYTES}")


def _write_all(file: int, content: memoryview, offset: int) -> None:
    """Write all of `content`, repeating `os.pwrite` after partial writes."""
    while len(content):
        num_written = os.pwrite(file, content, offset)
        content = content[num_written:]
        offset += num_written
