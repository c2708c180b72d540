"""`SlotFiles`: blocks in slots of a file, each with a header in another; what was half written is noticed.

    headers   | header 0 | header 1 | ...      128 bytes each; zeros for a slot without a block
    blocks    |  slot 0    |  slot 1    | ...  the bytes of a block, then up to the next multiple of 4096

    header    magic, length of the key, bytes of the block, use, checksum of the block, key, checksum of these

A block is written first and its header last, and a header is wiped before its slot is written again. So a
header that is there speaks of a block that is there, wherever a process was killed. After a crash of the
machine that need not be so, and the checksum of the block tells.
"""

from __future__ import annotations

import contextlib
import os
from struct import Struct, error
from typing import NamedTuple

import numpy as np
import xxhash

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.regular_files import open_private
from kv_pool.tiers.block_rows import ByteRows

MAGIC = b"kvb1"
HEADER_BYTES = 128
MAX_KEY_BYTES = 88
# Without the checksum of the header itself, which follows.
HEADER = Struct(f"<4sHxxQQQ{MAX_KEY_BYTES}s")
CHECKSUM = Struct("<Q")
NO_HEADER = bytes(HEADER_BYTES)
_ALIGNMENT = 4096
_REWRITTEN_BYTES = 1024 * 1024

assert HEADER.size + CHECKSUM.size == HEADER_BYTES


class SlotHeader(NamedTuple):
    """What is known of the block in a slot.

    Attributes:
        key: of the block.
        use: a number that grows: blocks with higher ones were used later.
        checksum: xxh3_64 of its bytes.
    """

    key: BlockHashWithGroupId
    use: int
    checksum: int


class SlotFiles:
    """The two files, opened or made in a folder that is ours alone.

    Args:
        folder: its descriptor.
        block_bytes: of each block as it is written.

    Reading takes no lock and changes nothing: threads may do it while another writes other slots, and what
    is read from a slot that is being written is noticed to be nothing.
    Raises OSError for whatever the system does not do.
    """

    def __init__(self, folder: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        # Headers may differ from what is on the disk: also those that an earlier process has written.
        self._is_synced = False
        self._must_rewrite = False
        self._stride = -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
        self._headers = open_private("headers", os.O_RDWR | os.O_CREAT, folder)
        try:
            self._blocks = open_private("blocks", os.O_RDWR | os.O_CREAT, folder)
        except BaseException:
            os.close(self._headers)
            raise

    def write(self, slot: int, key: BlockHashWithGroupId, block: ByteRows, use: int) -> None:
        """Let a slot without a block hold this one.

        Args:
            block: (block_bytes,), contiguous.
        Raises:
            OSError: such as a full disk. The slot is without a block.
        """
        checksum = xxhash.xxh3_64_intdigest(block.data)
        _write_all(self._blocks, block.data, slot * self._stride)
        try:
            self.write_header(slot, SlotHeader(key, use, checksum))
        except OSError:
            with contextlib.suppress(OSError):  # part of a header is none, by its checksum
                self.wipe(slot)
            raise

    def write_header(self, slot: int, header: SlotHeader) -> None:
        """Say what a slot holds. Within a page of the file, so that no part of it is written alone."""
        key = header.key
        packed = HEADER.pack(MAGIC, len(key), self.block_bytes, header.use, header.checksum, key)
        packed += CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed))
        self._is_synced = False
        _write_all(self._headers, memoryview(packed), slot * HEADER_BYTES)

    def wipe(self, slot: int) -> None:
        """Let a slot be without a block. After a crash of the machine it may have it again: see `sync`."""
        self._is_synced = False
        _write_all(self._headers, memoryview(NO_HEADER), slot * HEADER_BYTES)

    def wipe_all(self) -> None:
        """Let all slots be without blocks, for good; the files are empty."""
        self._is_synced = False
        os.ftruncate(self._headers, 0)
        self.sync()
        with contextlib.suppress(OSError):  # blocks without headers are not found, and will be overwritten
            os.ftruncate(self._blocks, 0)

    def sync(self) -> None:
        """Wait until what headers say is on the disk; at once if it is.

        After a failed call the system takes what it could not write for written. So the next call writes all
        headers again.
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

    def read_header(self, slot: int) -> SlotHeader | None:
        """What a slot holds; None for nothing, or nothing that can be made out."""
        return self._parse(os.pread(self._headers, HEADER_BYTES, slot * HEADER_BYTES))

    def read(self, slot: int, into: ByteRows) -> SlotHeader | None:
        """Read the block in a slot, and what it is.

        Args:
            into: (block_bytes,), contiguous; may hold anything if the answer is None.
        Returns:
            None if there is no block, or not the one that was written.
        """
        header = self.read_header(slot)
        if header is None or not self._read_block(slot, into):
            return None
        return header if xxhash.xxh3_64_intdigest(into.data) == header.checksum else None

    def list_headers(self, num_slots: int) -> tuple[list[tuple[int, SlotHeader]], int]:
        """What the first `num_slots` slots hold by their headers, and how many headers are no good.

        A header beyond the end of the blocks is no good either, and wiped. Later slots are cut off.
        """
        for file, stride in ((self._headers, HEADER_BYTES), (self._blocks, self._stride)):
            if os.fstat(file).st_size > num_slots * stride:
                os.ftruncate(file, num_slots * stride)
        num_bytes = os.fstat(self._blocks).st_size
        found: list[tuple[int, SlotHeader]] = []
        num_bad = 0
        slot = 0
        while chunk := os.pread(self._headers, 8192 * HEADER_BYTES, slot * HEADER_BYTES):
            num_whole = len(chunk) // HEADER_BYTES
            rows = np.frombuffer(chunk, np.uint8, num_whole * HEADER_BYTES).reshape(num_whole, HEADER_BYTES)
            for place in np.flatnonzero(rows.any(axis=1)).tolist():
                header = self._parse(rows[place].tobytes())
                end = (slot + place) * self._stride + self.block_bytes
                if header is None or end > num_bytes:
                    num_bad += 1
                    self.wipe(slot + place)
                else:
                    found.append((slot + place, header))
            slot += num_whole
            if num_whole * HEADER_BYTES != len(chunk):  # the end of a file that was cut off
                num_bad += 1
                os.ftruncate(self._headers, slot * HEADER_BYTES)
        return found, num_bad

    def close(self) -> None:
        """Close both files."""
        os.close(self._headers)
        os.close(self._blocks)

    def _parse(self, packed: bytes) -> SlotHeader | None:
        try:
            magic, key_bytes, block_bytes, use, checksum, key = HEADER.unpack_from(packed)
            (of_header,) = CHECKSUM.unpack_from(packed, HEADER.size)
        except error:  # cut off
            return None
        if magic != MAGIC or block_bytes != self.block_bytes or key_bytes > MAX_KEY_BYTES:
            return None
        if xxhash.xxh3_64_intdigest(packed[: HEADER.size]) != of_header:
            return None
        return SlotHeader(BlockHashWithGroupId(key[:key_bytes]), use, checksum)

    def _read_block(self, slot: int, into: ByteRows) -> bool:
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
        raise InvalidArgumentError(f"a key of {len(key)} bytes; a tier on disk has room for {MAX_KEY_BYTES}")


def _write_all(file: int, content: memoryview, offset: int) -> None:
    """`os.pwrite`, which may stop in between, to the end."""
    while len(content):
        num_written = os.pwrite(file, content, offset)
        content = content[num_written:]
        offset += num_written
