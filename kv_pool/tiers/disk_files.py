"""`SlotFiles`: the files of a disk tier, in a folder that is locked and described.

    headers   | header 0 | header 1 | ...      128 bytes each; zeros for a slot without a block
    blocks    |  slot 0    |  slot 1    | ...  the bytes of a block, padded to a multiple of 4096

    header    magic, lengths of key and parent, bytes of the block, use, checksum of the block,
              key, parent and tokens of the prefix, checksum of these

A block is written before its header, and a header is wiped before its slot is written again. A valid header
therefore always describes a complete block, even if the process was killed. A crash of the machine can break
this order; the checksum of the block detects that.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import msgspec
import xxhash

from kv_pool.errors import InvalidArgumentError, LayoutMismatchError, TierError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockHashWithGroupId, SlotId
from kv_pool.regular_files import open_private, open_private_folder
from kv_pool.storage.block_layout import BlockLayout, check_alike
from kv_pool.tiers.host_tier import ByteRows

DESCRIPTION = "tier.json"
LOCK = "lock"
VERSION = 2
"""2: the layout may name model and weights. Folders of version 1 name neither, and are used without."""
_READ_VERSIONS = (1, VERSION)
_DRAFT = DESCRIPTION + ".new"
_MAX_DESCRIPTION_BYTES = 1024 * 1024


class Description(msgspec.Struct, frozen=True):
    """The content of `tier.json`.

    Attributes:
        version: version of the folder's file format.
        layout: the meaning of bytes and hashes.
        format: the name of the block format.
        encoded_bytes: size of an encoded block.
    """

    version: int
    layout: BlockLayout
    format: str
    encoded_bytes: int


MAGIC = b"kvb1"
HEADER_BYTES = 128
MAX_KEY_BYTES = 88
# Without the checksum of the header itself, which follows.
# The length of the parent is one more than its bytes; 0 if unknown, too long, or written by an older version.
HEADER = Struct(f"<4sHHQQQ{MAX_KEY_BYTES}s")
CHECKSUM = Struct("<Q")
NUM_TOKENS = Struct("<I")
NO_HEADER = bytes(HEADER_BYTES)
_NO_HEADERS = bytes(8192 * HEADER_BYTES)
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
    checksum: int = 0
    parent: bytes | None = None
    num_tokens: int = 0


class SlotFiles:
    """The files of a disk tier, in a folder that is opened or created, and locked until `close`.

    Only this user can write to the folder and open its files; all of them are regular files with a single
    link.

    Attributes:
        path: the folder.
        block_bytes: size of an encoded block.

    Raises:
        LayoutMismatchError: its blocks have another layout, format or version. The folder is unchanged.
        TierError: the folder is in use by another tier, or contains other files.
        OSError: the folder cannot be created, read or written, or is accessible to other users.

    Reads take no lock and change nothing. Threads may read while another thread writes; a read from a slot
    that is being written returns no block.
    Methods raise OSError if the operating system fails.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path
        self.block_bytes = description.encoded_bytes
        # False: headers may not be on the disk yet, including those written by an earlier process.
        self._is_synced = False
        self._must_rewrite = False
        self._stride = -(-self.block_bytes // _ALIGNMENT) * _ALIGNMENT
        with ExitStack() as opened:
            folder = _open_folder(path, description, opened)
            self._headers = open_private("headers", os.O_RDWR | os.O_CREAT, folder)
            opened.callback(os.close, self._headers)
            self._blocks = open_private("blocks", os.O_RDWR | os.O_CREAT, folder)
            opened.callback(os.close, self._blocks)
            self._opened = opened.pop_all()

    def write(self, slot: SlotId, header: SlotHeader, block: ByteRows) -> None:
        """Write a block and its header, which gets the block's checksum, into an empty slot.

        Args:
            block: (block_bytes,) uint8, contiguous.
        Raises:
            OSError: for example, the disk is full. The slot is empty.
        """
        _write_all(self._blocks, block.data, slot * self._stride)
        try:
            self.write_header(slot, header._replace(checksum=xxhash.xxh3_64_intdigest(block.data)))
        except OSError:
            with suppress(OSError):  # a partial header is invalid by its checksum
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
        with suppress(OSError):  # blocks without headers are never found
            os.ftruncate(self._blocks, 0)

    def sync(self) -> None:
        """Wait until all headers are on the disk. No-op if they are.

        After a failed fsync the operating system marks the unwritten pages as clean. Therefore the next call
        writes all headers again.
        """
        if self._is_synced:
            return
        offset = 0
        while self._must_rewrite and (chunk := os.pread(self._headers, _REWRITTEN_BYTES, offset)):
            _write_all(self._headers, memoryview(chunk), offset)
            offset += len(chunk)
        self._must_rewrite = True
        os.fsync(self._headers)
        self._must_rewrite = False
        self._is_synced = True

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
        while chunk := os.pread(self._headers, len(_NO_HEADERS), first * HEADER_BYTES):
            if chunk == _NO_HEADERS[: len(chunk)]:  # most of a large folder
                first += -(-len(chunk) // HEADER_BYTES)
                continue
            for slot, start in enumerate(range(0, len(chunk), HEADER_BYTES), first):
                packed = chunk[start : start + HEADER_BYTES]
                header = None if packed == NO_HEADER else self._parse(packed)
                if header is not None and slot * self._stride + self.block_bytes <= num_bytes:
                    found.append((SlotId(slot), header))
                elif len(packed) < HEADER_BYTES:  # the file ends inside a header
                    num_bad += 1
                    os.ftruncate(self._headers, slot * HEADER_BYTES)
                elif packed != NO_HEADER:
                    num_bad += 1
                    self.wipe(SlotId(slot))
            first = slot + 1
        return found, num_bad

    def close(self) -> None:
        """Close all files and unlock the folder. No-op on a second call."""
        self._opened.close()

    def _parse(self, packed: bytes) -> SlotHeader | None:
        try:
            magic, key_bytes, parent_bytes, block_bytes, use, checksum, names = HEADER.unpack_from(packed)
            (of_header,) = CHECKSUM.unpack_from(packed, HEADER.size)
        except struct.error:  # truncated
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


def _open_folder(path: Path, description: Description, opened: ExitStack) -> int:
    """Open or create a tier's folder, and lock it until `opened` is closed. Return its descriptor.

    Files left by an earlier, failed attempt to create the folder are replaced.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = open_private_folder(path)
    opened.callback(os.close, folder)
    names = set(os.listdir(folder))
    others = sorted(names - {LOCK, _DRAFT})
    if DESCRIPTION not in names and others:
        raise TierError(
            f"{path} is not a tier's folder: it has no {DESCRIPTION}, but {', '.join(others[:5])}. "
            "Use an empty or a new folder"
        )
    lock = open_private(LOCK, os.O_RDWR | os.O_CREAT, folder)
    opened.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TierError(
            f"{path} is in use by another tier, in this process or another; close that tier, or use "
            "another folder"
        ) from None
    if DESCRIPTION in os.listdir(folder):
        _check_description(path, description, folder)
    else:
        _write_description(description, folder)
    return folder


def _check_description(path: Path, description: Description, folder: int) -> None:
    with open(open_private(DESCRIPTION, os.O_RDONLY, folder), "rb") as file:
        content = file.read(_MAX_DESCRIPTION_BYTES)
    try:
        found = msgspec.json.decode(content, type=Description)
    except UNDECODABLE as error:
        raise TierError(
            f"{path / DESCRIPTION} does not describe a tier: {error}. Use another folder, or remove this one"
        ) from error
    if found.version not in _READ_VERSIONS:
        raise LayoutMismatchError(
            f"blocks of {path} cannot be used here: they were written in format version "
            f"{found.version}; supported versions are {', '.join(map(str, _READ_VERSIONS))}. Use another "
            "folder"
        )
    description.layout.check_same(found.layout, str(path))
    check_alike(f"blocks of {path}", ("format", "encoded_bytes"), description, found)


def _write_description(description: Description, folder: int) -> None:
    """Write the description atomically: after a crash it is either complete or absent."""
    with suppress(FileNotFoundError):
        os.unlink(_DRAFT, dir_fd=folder)
    with open(open_private(_DRAFT, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder), "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(description)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(_DRAFT, DESCRIPTION, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)
