"""Pack a block hash and a KV cache group into a prefix map key, and unpack them."""

from collections.abc import Sequence
from struct import Struct
from typing import cast

from kv_pool.errors import GroupIdError
from kv_pool.ids import BlockHash, BlockHashWithGroupId, ExternalBlockHash, GroupId

MAX_GROUP_ID = 2**32 - 1

GROUP_0 = b"\0\0\0\0"
_UNPACK_AT_ONCE = 64
# (bytes before, bytes after, number of strings) -> Struct; at most 64 entries per hash size in use.
_unpackers: dict[tuple[int, int, int], Struct] = {}


def group_suffix(group_id: GroupId) -> bytes:
    """Return the key suffix of a group id: 4 bytes, big-endian, unsigned.

    Raises:
        GroupIdError: `group_id` does not fit.
    """
    if group_id == 0:
        return GROUP_0
    if group_id < 0 or group_id > MAX_GROUP_ID:
        raise GroupIdError(f"KV cache group id {group_id} is not in 0..{MAX_GROUP_ID}")
    return group_id.to_bytes(4, "big")


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: GroupId) -> BlockHashWithGroupId:
    """Return the prefix map's key for this hash in this group.

    Raises:
        GroupIdError: `group_id` does not fit into 4 unsigned bytes.
    """
    return BlockHashWithGroupId(block_hash + group_suffix(group_id))


def is_key(key: bytes, block_hash: bytes, suffix: bytes) -> bool:
    """Return True if `key` equals `block_hash + suffix`, without building that."""
    return key.startswith(block_hash) and len(key) == len(block_hash) + 4 and key.endswith(suffix)


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """Return the hash in a key."""
    return BlockHash(key[:-4])


def get_group_id(key: BlockHashWithGroupId) -> GroupId:
    """Return the group id in a key."""
    return cast(GroupId, int.from_bytes(key[-4:], "big"))


def make_external_block_hash(block_hash: bytes) -> ExternalBlockHash:
    """Return a hash as events carry it by default: its last 8 bytes as an unsigned big-endian integer."""
    return int.from_bytes(block_hash[-8:], "big")


def make_external_block_hashes(strings: Sequence[bytes], num_bytes_after: int) -> list[int]:
    """Return the external hash of each of these hashes or keys, as integers.

    Batched: a fifth of the cost of one call per hash (benchmarks/bench_block_pool.py, events).

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
        else:  # hashes shorter than 8 bytes, or of different sizes
            for string in some:
                end = len(string) - num_bytes_after
                external.append(int.from_bytes(string[max(0, end - 8) : end], "big"))
    return external
