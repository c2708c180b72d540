"""`cache_prefix`: caches the first blocks of a sequence under given hashes."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash, GroupId, SequenceId


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The request attributes that a pool reads, for a sequence known only by its hashes."""

    block_hashes: Sequence[BlockHash]
    all_token_ids: Sequence[int]
    lora_request: None = None
    mm_features: None = None
    cache_salt: None = None
    session_id: None = None


def cache_prefix(
    pool: RunBlockPool,
    sequence_id: SequenceId,
    blocks: list[KVCacheBlock],
    block_hashes: Sequence[BlockHash],
    token_ids: Sequence[int] | None,
) -> None:
    """See `GPUKVPool.cache_prefix`; `blocks` are all blocks of the sequence."""
    num_hashes = len(block_hashes)
    block_size = pool.hash_block_size
    if num_hashes > len(blocks):
        raise InvalidArgumentError(
            f"{num_hashes} hashes for the {len(blocks)} blocks of sequence {sequence_id}"
        )
    if token_ids is not None and len(token_ids) < num_hashes * block_size:
        raise InvalidArgumentError(
            f"{len(token_ids)} token ids for {num_hashes} blocks of {block_size} tokens"
        )
    num_cached = 0
    while num_cached < num_hashes and blocks[num_cached].block_hash is not None:
        num_cached += 1
    # A cached block may follow one that is not cached, for example after a migration.
    is_bare = [block.block_hash is None for block in blocks[num_cached:num_hashes]]
    prefix = _Prefix(block_hashes, token_ids or [])
    pool.cache_full_blocks(prefix, blocks, num_cached, num_hashes, block_size, GroupId(0), is_bare)
