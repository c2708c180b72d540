"""`HostSwap`: swaps preempted requests to a pool in host memory instead of recomputing them."""

from kv_pool.core.block_pool import BlockPool
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.preemption import PreemptionKind, PreemptionLoss, PreemptionRule, count_loss
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.replay_tiers import CopyLink
from kv_pool.replay.report import ReplayReport
from kv_pool.tiers.swap.swapper import BlockSwapper


class HostSwap:
    """A host pool for preempted requests, with copies between device and host in virtual time.

    A swapped-out request releases its device blocks at once and continues when its copy back is done. An
    engine would also wait for the copy out before it writes into the released blocks.

    Args:
        manager: the manager of the requests.
        num_blocks: capacity of the host pool, without the null block.
        block_bytes: size of a block.
        link: the connection between device and host.
        rule: decides whether a request is swapped out, if the host has free blocks, or recomputed.
        report: receives the counts of copies.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        num_blocks: int,
        block_bytes: int,
        link: CopyLink,
        rule: PreemptionRule,
        report: ReplayReport,
    ) -> None:
        pool = manager.block_pool
        host_pool = BlockPool(
            num_blocks + 1, True, pool.hash_block_size, pool.enable_kv_cache_events, medium="CPU"
        )
        self.swapper = BlockSwapper(manager, host_pool)
        self._manager = manager
        self._link = link
        self._block_bytes = block_bytes
        self._rule = rule
        self._report = report

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
