"""A negative count is refused with its name by constructors and by what test_wrong_types.py does not call."""

from collections.abc import Callable

import pytest

from kv_pool import (
    BlockAllocationRequest,
    BlockHasher,
    BlockPool,
    BlockRetention,
    BlockSwapper,
    CrossAttentionSpec,
    FullAttentionSpec,
    GPUKVPool,
    InvalidArgumentError,
    KVCacheManager,
    PlaceholderRange,
    PrefixRules,
    Request,
)
from kv_pool.contiguous import gather, pack, plan_clear_run, plan_gather, plan_pack
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.migration.migration_hook import MigrationHook
from kv_pool.tiers.onboarder import TierOnboarder
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

HASHER = BlockHasher("sha256", block_size=4)


class Parts:
    """One of each, small, with blocks in use."""

    def __init__(self) -> None:
        groups = [FullAttentionSpec(block_size=4), CrossAttentionSpec(block_size=4)]
        self.manager = KVCacheManager(BlockPool(20, True, 4), groups=groups)
        self.running = Request("running", range(10), HASHER, cache_salt="s")
        self.manager.allocate_slots(self.running, 10)
        self.running.num_computed_tokens = 10
        self.new = Request("new", range(50, 60), HASHER, cache_salt="s")
        self.swapper = BlockSwapper(self.manager, BlockPool(20, True, 4, medium="CPU"))
        self.gpu_pool = GPUKVPool(20, 4)
        self.gpu_pool.allocate(BlockAllocationRequest(3, 1))
        self.hook = MigrationHook()
        self.hook.use(self.gpu_pool)
        self.run_pool = RunBlockPool(20, True, 4)
        self.run_pool.get_new_blocks(5)
        tiered = KVCacheManager(BlockPool(20, True, 4))
        self.onboarder = TierOnboarder(tiered, TieredCache(tiered.block_pool, None, [Tier(5, "CPU")]))


CALLS: dict[str, Callable[[Parts], object]] = {
    "num_lookahead_tokens of swap_in": lambda p: swap(p).swap_in(p.running, num_lookahead_tokens=-1),
    "num_new_tokens of can_swap_in": lambda p: swap(p).can_swap_in(p.running, num_new_tokens=-1),
    "num_hash_lookahead_tokens": lambda p: BlockPool(9, True, 4, num_hash_lookahead_tokens=-1),
    "num_reprefillable_tokens": lambda p: PrefixRules(num_reprefillable_tokens=-1),
    "max_pinned_blocks of BlockRetention": lambda p: BlockRetention(
        BlockPool(9, True, 4), lambda: 0.0, max_pinned_blocks=-1
    ),
    "offset": lambda p: PlaceholderRange(-1, 4),
    "length": lambda p: PlaceholderRange(0, -4),
    "block_bytes": lambda p: GPUKVPool(9, 4, block_bytes=-1),
    "max_pinned_blocks": lambda p: GPUKVPool(9, 4, max_pinned_blocks=-1),
    "run_length": lambda p: GPUKVPool(9, 4, run_length=-1),
    "run_length of ControlledManager": lambda p: ControlledManager(p.manager, run_length=0),
    "num_blocks of keep_free": lambda p: p.hook.keep_free(-1),
    "max_moves of a request": lambda p: p.gpu_pool.allocate(BlockAllocationRequest(2, 5, max_moves=-1)),
    "max_moves of pack": lambda p: pack(p.run_pool, print, max_moves=-1),
    "max_evictions of gather": lambda p: gather(p.run_pool, print, max_evictions=-1),
    "max_moves of plan_pack": lambda p: plan_pack(p.run_pool, max_moves=-1),
    "max_moves of plan_gather": lambda p: plan_gather(p.run_pool, 4, max_moves=-1),
    "max_moves of plan_clear_run": lambda p: plan_clear_run(p.run_pool, 2, max_moves=-1),
    "max_prefetch_blocks": lambda p: TieredCache(
        BlockPool(9, True, 4), None, [Tier(5, "CPU")], max_prefetch_blocks=-1
    ),
    "max_num_tokens of find_prefix": lambda p: p.onboarder.find_prefix(p.new, None, -1),
    "max_num_tokens of admit": lambda p: p.onboarder.admit(p.new, max_prefix_tokens=-1),
    "num_new_tokens of admit": lambda p: p.onboarder.admit(p.new, -1),
}


def swap(parts: Parts) -> BlockSwapper:
    plan = parts.swapper.swap_out(parts.running)
    assert plan is not None
    plan.apply(lambda moves: None)
    return parts.swapper


@pytest.mark.parametrize("name", CALLS)
def test_a_negative_count_is_refused_by_name(name):
    parts = Parts()
    before = parts.gpu_pool.get_free_blocks(), parts.run_pool.get_num_free_blocks()
    with pytest.raises(InvalidArgumentError, match=name.partition(" ")[0]):
        CALLS[name](parts)
    assert (parts.gpu_pool.get_free_blocks(), parts.run_pool.get_num_free_blocks()) == before
    assert not parts.manager.holds_blocks("new")
    assert parts.gpu_pool.blocks_of(1) == [4, 5, 6]
