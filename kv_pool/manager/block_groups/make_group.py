"""`make_group`: create the `BlockGroup` for a spec."""

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups.block_group import (
    BlockGroup,
    ChunkedLocalGroup,
    CrossAttentionGroup,
    EncoderOnlyGroup,
    SingleStateGroup,
    SlidingWindowGroup,
)
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.block_groups.mamba_group import MambaGroup


def make_group(spec: KVCacheSpec, pool: BlockPoolCore, group_id: GroupId, alignment: int) -> BlockGroup:
    """Return the group that a spec describes. Raise InvalidTypeError for any other spec."""
    block_size = spec.block_size
    if isinstance(spec, FullAttentionSpec):
        return BlockGroup(pool, group_id, block_size, alignment)
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowGroup(
            pool, group_id, block_size, alignment, spec.sliding_window, spec.extra_retained_tokens
        )
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ChunkedLocalGroup(pool, group_id, block_size, alignment, spec.attention_chunk_size)
    if isinstance(spec, MambaSpec):
        if not spec.has_states_at_block_ends:
            if pool.enable_caching:
                raise InvalidArgumentError(
                    "a MambaSpec without has_states_at_block_ends has no states to cache; create the pool "
                    "with enable_caching=False"
                )
            return SingleStateGroup(pool, group_id, block_size, spec.num_speculative_blocks)
        checkpoint_alignment = spec.prefill_checkpoint_alignment or 0
        return MambaGroup(
            pool, group_id, block_size, alignment, spec.num_speculative_blocks, checkpoint_alignment
        )
    if isinstance(spec, CrossAttentionSpec):
        return CrossAttentionGroup(pool, group_id, block_size)
    if isinstance(spec, EncoderOnlyAttentionSpec):
        return EncoderOnlyGroup(pool, group_id, block_size)
    raise InvalidTypeError(
        f"{spec!r} is not a spec of a KV cache group; see kv_pool.manager.block_groups.kv_cache_spec"
    )
