"""`cache_prefix`: makes the first blocks of a sequence findable by hashes."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.block import KVCacheBlock
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHash


@dataclass(frozen=True, slots=True)
class _Prefix:
    """The attributes of a request that a pool reads, for a sequence of which only hashes are known."""

    block_hashes: Sequence[BlockHash]
    all_token_ids: Sequence[int]
    lora_request: None = None
    mm_features: None = None
    cache_salt: None = None
    session_id: None = None


def cache_prefix(
    pool: RunBlockPool,
    sequence_id: int,
    blocks: list[KVCacheBlock],
    block_hashes: Sequence[BlockHash],
    token_ids: Sequence[int] | None,
) -> None:
    """See `GPUKVPool.cache_prefix`; `blocks` are all of the sequence."""
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
    # A block may be cached behind one that is not: one that migrated here, say.
    is_bare = [block.block_hash is None for block in blocks[num_cached:num_hashes]]
    prefix = _Prefix(block_hashes, token_ids or [])
    pool.cache_full_blocks(prefix, blocks, num_cached, num_hashes, block_size, 0, is_bare)
