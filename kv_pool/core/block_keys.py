"""Keys of the prefix map: a block hash and a KV cache group in one string of bytes, and back."""

from collections.abc import Sequence
from struct import Struct

from kv_pool.errors import GroupIdError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, ExternalBlockHash

MAX_GROUP_ID = 2**32 - 1

GROUP_0 = b"\0\0\0\0"
_UNPACK_AT_ONCE = 64
# From (bytes before, bytes after, strings) to what unpacks so many: at most 64 for each size of hash in use.
_unpackers: dict[tuple[int, int, int], Struct] = {}


def group_suffix(group_id: int) -> bytes:
    """A group id as the end of a key: 4 bytes, big-endian, unsigned.

    Raises:
        GroupIdError: it does not fit.
    """
    if group_id == 0:
        return GROUP_0
    if group_id < 0 or group_id > MAX_GROUP_ID:
        raise GroupIdError(f"KV cache group id {group_id} is not in 0..{MAX_GROUP_ID}")
    return group_id.to_bytes(4, "big")


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The prefix map's key for this hash in this group.

    Raises:
        GroupIdError: `group_id` does not fit into 4 bytes unsigned.
    """
    return BlockHashWithGroupId(block_hash + group_suffix(group_id))


def is_key(key: bytes, block_hash: bytes, suffix: bytes) -> bool:
    """Is the key this hash and this end, without making a key to compare with?"""
    return key.startswith(block_hash) and len(key) == len(block_hash) + 4 and key.endswith(suffix)


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The hash in a key."""
    return BlockHash(key[:-4])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The group in a key."""
    return int.from_bytes(key[-4:], "big")


def make_external_block_hash(block_hash: bytes) -> ExternalBlockHash:
    """A block hash as events carry it by default: its last 8 bytes as an unsigned big-endian integer."""
    return int.from_bytes(block_hash[-8:], "big")


def make_external_block_hashes(strings: Sequence[bytes], num_bytes_after: int) -> list[int]:
    """The external hash of each of these hashes or keys, as integers.

    Many at once: a fifth of what one call for each costs (benchmarks/bench_block_pool.py, events).

    Args:
        num_bytes_after: bytes after the hash in each string: 0 for a hash, 4 for a key.
    """
    external: list[int] = []
    for start in range(0, len(strings), _UNPACK_AT_ONCE):
        some = strings[start : start + _UNPACK_AT_ONCE]
        size = len(some[0])
        num_bytes_before = size - num_bytes_after - 8
        for string in some:
            if len(string) != size:
                num_bytes_before = -1
        if num_bytes_before >= 0:
            kind = (num_bytes_before, num_bytes_after, len(some))
            unpacker = _unpackers.get(kind)
            if unpacker is None:
                unpacker = Struct(">" + f"{num_bytes_before}xQ{num_bytes_after}x" * len(some))
                _unpackers[kind] = unpacker
            external.extend(unpacker.unpack(b"".join(some)))
        else:  # hashes of fewer than 8 bytes, or of several sizes
            for string in some:
                end = len(string) - num_bytes_after
                external.append(int.from_bytes(string[max(0, end - 8) : end], "big"))
    return external
