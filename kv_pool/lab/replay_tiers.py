"""`ReplayTiers`, `HostSwap`: the memory below a replay's pool, with copies in virtual time."""

from kv_pool.core.block_pool import BlockPool
from kv_pool.core.kv_events import MEDIUM_CPU, MEDIUM_STORAGE
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.lab.report import ReplayReport, TierReport
from kv_pool.lab.settings import ReplaySettings
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.preemption import (
    PreemptionCost,
    PreemptionKind,
    PreemptionLoss,
    PreemptionRule,
    count_loss,
)
from kv_pool.tiers.onboarder import TierHit, TierOnboarder
from kv_pool.tiers.swapper import BlockSwapper
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache


class CopyLink:
    """A connection between two memories, with one rate for both directions together.

    Args:
        bytes_per_s: the rate in bytes per second.

    Attributes:
        free_ms: completion time (ms) of all copies requested so far.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.free_ms = 0.0
        self._bytes_per_ms = bytes_per_s / 1000

    def copy(self, num_bytes: int, now_ms: float) -> float:
        """Return the completion time (ms) of this copy, queued behind earlier ones; `now_ms` for 0 bytes."""
        if not num_bytes:
            return now_ms
        self.free_ms = max(now_ms, self.free_ms) + num_bytes / self._bytes_per_ms
        return self.free_ms


class ReplayTiers:
    """Lower tiers of the manager's pool, without bytes, and the copies to and from them, in virtual time.

    Args:
        manager: the manager of the pool.
        settings: `has_tiers` must be true.
        link: the connection between device and host.

    Attributes:
        onboarder: the `TierOnboarder` that an engine would use.
        reports: the reports of the tiers, fastest first.

    A step waits until the blocks that it overwrites are offloaded, like an engine that calls
    `TieredCache.flush`.
    """

    def __init__(self, manager: KVCacheManager, settings: ReplaySettings, link: CopyLink) -> None:
        sizes = ((MEDIUM_CPU, settings.host_tier), (MEDIUM_STORAGE, settings.disk_tier))
        tiers = [Tier(num_blocks, medium) for medium, num_blocks in sizes if num_blocks]
        pool = manager.block_pool
        events = pool.enable_kv_cache_events
        self._cache = TieredCache(pool, None, tiers, settings.tier_write, enable_events=events)
        self.onboarder = TierOnboarder(manager, self._cache)
        self.reports = [TierReport(tier.medium, tier.capacity) for tier in tiers]
        self._block_size = manager.block_size
        self._block_bytes = settings.block_bytes
        self._link = link
        self._disk = CopyLink(settings.rates.disk_bytes_per_s)
        self._num_linked = 0
        self._num_on_disk = 0

    def copy(self, now_ms: float) -> float:
        """Return the completion time (ms) of the copies of all stores and reads since the last call."""
        statistics = self._cache.get_statistics()
        num_linked = statistics[0].num_stored + sum(tier.num_read for tier in statistics)
        num_on_disk = sum(
            tier.num_stored + tier.num_read for tier in statistics if tier.medium == MEDIUM_STORAGE
        )
        linked_ms = self._link.copy((num_linked - self._num_linked) * self._block_bytes, now_ms)
        on_disk_ms = self._disk.copy((num_on_disk - self._num_on_disk) * self._block_bytes, now_ms)
        self._num_linked, self._num_on_disk = num_linked, num_on_disk
        return max(linked_ms, on_disk_ms)

    def note_hit(self, hit: TierHit, num_missing: int) -> None:
        """Count a hit without the last `num_missing` tokens of its last block, which is in the last tier."""
        for report in reversed(self.reports):
            num_tokens = hit.num_tokens_by_medium[report.medium]
            if num_tokens:
                report.blocks_hit += num_tokens // self._block_size
                report.tokens_hit += num_tokens - num_missing
                num_missing = 0

    def fill_reports(self) -> None:
        """Copy the tiers' current statistics into the reports."""
        for report, tier in zip(self.reports, self._cache.get_statistics(), strict=True):
            report.blocks_held = tier.num_blocks
            report.blocks_written = tier.num_stored
            report.blocks_read = tier.num_read
            report.bytes_moved = (tier.num_stored + tier.num_read) * self._block_bytes
            report.evictions = tier.num_removed


class HostSwap:
    """A host pool for preempted requests, with copies between device and host in virtual time.

    A swapped-out request releases its device blocks at once and continues when its copy back is done. An
    engine would also wait for the copy out before it writes into the released blocks.

    Args:
        manager: the manager of the requests.
        settings: the capacity of the host pool, and the rule that decides whether a request is swapped out,
            if the host has free blocks, or recomputed.
        link: the connection between device and host.
        report: receives the counts of copies.
    """

    def __init__(
        self, manager: KVCacheManager, settings: ReplaySettings, link: CopyLink, report: ReplayReport
    ) -> None:
        pool = manager.block_pool
        num_blocks = settings.host_blocks + 1
        events = pool.enable_kv_cache_events
        host_pool = BlockPool(num_blocks, True, pool.hash_block_size, events, medium="CPU")
        self.swapper = BlockSwapper(manager, host_pool)
        self._manager = manager
        self._link = link
        self._block_bytes = settings.block_bytes
        self._report = report
        self._rule: PreemptionRule = swap_always
        if settings.preemption == "cost":
            rates = settings.rates
            self._rule = PreemptionCost(
                prefill_tokens_per_s=rates.prefill_tokens_per_s,
                copy_bytes_per_s=rates.copy_bytes_per_s,
                block_bytes=settings.block_bytes,
            )

    def holds(self, request: ReplayRequest) -> bool:
        """Return True while the request is swapped out."""
        return self.swapper.is_swapped_out(request.request_id)

    def take_out(self, request: ReplayRequest, now_ms: float) -> bool:
        """Swap out a running request; its current step is lost.

        Returns:
            False, with nothing changed, if the rule decides to recompute or the host has too few free blocks.
        """
        if self._rule(count_loss(self._manager, request)) is not PreemptionKind.SWAP:
            return False
        plan = self.swapper.swap_out(request)
        if plan is None:
            return False
        plan.commit()
        self._report.swapped_out += 1
        self._report.blocks_swapped_out += len(plan.moves)
        self._copy(len(plan.moves), now_ms)
        return True

    def bring_back(self, request: ReplayRequest, num_next_tokens: int, now_ms: float) -> float | None:
        """Swap in a request, with slots for `num_next_tokens` more tokens.

        Returns:
            The completion time of its copy (ms); None, with nothing changed, if the pool has too few blocks.
        """
        plan = self.swapper.swap_in(request, num_new_tokens=num_next_tokens)
        if plan is None:
            return None
        plan.commit()
        self._report.swapped_in += 1
        self._report.blocks_swapped_in += len(plan.moves)
        return self._copy(len(plan.moves), now_ms)

    def _copy(self, num_blocks: int, now_ms: float) -> float:
        self._report.bytes_moved += num_blocks * self._block_bytes
        return self._link.copy(num_blocks * self._block_bytes, now_ms)


def swap_always(loss: PreemptionLoss, /) -> PreemptionKind:
    """Return SWAP for every request that has computed tokens."""
    return PreemptionKind.SWAP if loss.num_computed_tokens else PreemptionKind.RECOMPUTE
