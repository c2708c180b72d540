"""`TierScheduler`: the scheduler half; it decides what is stored, loaded and evicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_pool.core.holds import Hold
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId
from kv_pool.integrations.vllm.connector.tier_index import (
    LoadOrder,
    StepOrders,
    StoreOrder,
    TierIndex,
    WorkerReport,
)
from kv_pool.loggers import get_logger
from kv_pool.reports.tiers import TierList
from kv_pool.tiers.tier_prefixes import GroupKeys, Rows, TierPrefixes

_logger = get_logger(__name__)

COUNTS = ("stored blocks", "loaded tokens", "demoted blocks", "skipped blocks", "lost blocks")
"""The names of the counts:

stored: blocks that were stored in host memory.
loaded: tokens that requests loaded instead of computing them, failed loads included.
demoted: blocks that were evicted from host memory to disk.
skipped: blocks that were not stored at their request's end, because of too many other stores.
lost: blocks that could not be stored or loaded.
"""


@dataclass
class FollowedRequest:
    """A request whose blocks are stored.

    Attributes:
        request: vLLM's request.
        num_seen: for each group, the number of blocks that are stored or need not be.
        next_at: the number of computed tokens from which there are other blocks.
    """

    request: Any
    num_seen: list[int]
    next_at: int = 0


@dataclass
class HeldHit:
    """A hit in the tiers that a request may load. Its keys are held.

    Attributes:
        start: number of tokens on the device before it.
        num_tokens: its tokens.
        rows: the blocks to load.
    """

    start: int
    num_tokens: int
    rows: Rows

    def list_keys(self) -> list[BlockHashWithGroupId]:
        """Return the keys of the hit, of each group the last block first."""
        return [row[position] for row in self.rows for position in sorted(row, reverse=True)]


@dataclass
class RunningStore:
    """A store that is ordered and not finished.

    Attributes:
        order: the order.
        hold: what keeps its blocks from being reused.
        num_ranks: the ranks that have finished it.
        used_after: keys to mark as used once it has ended: then its blocks are in their places in the order.
    """

    order: StoreOrder
    hold: Any
    num_ranks: int = 0
    used_after: list[BlockHashWithGroupId] = field(default_factory=list)


class TierScheduler:
    """The scheduler half of the tiers. One per engine; called from the scheduler's thread.

        request is new          find_hit                  how many tokens the tiers have
        blocks are allocated    plan_load                 which blocks are loaded
        each step               take_orders               stores of computed blocks; all orders of the step
        a request ends          finish_request            stores of its last blocks
        workers have answered   apply_report, end_loads   what is found from now on

    Args:
        index: what the tiers hold.
        groups: the engine's groups; all of them are stored.
        alignment: hits are a multiple of this number of tokens.
        num_ranks: a store is finished when all ranks have reported it.
        drops_last_block: do not load the last block of a hit, which EAGLE and MTP draft models recompute.
        lease_s: see `ConnectorSettings`.
        listener: a `TierEventLog`, which learns which keys enter and leave a tier; None for no events.
    """

    def __init__(
        self,
        index: TierIndex,
        groups: Sequence[GroupKeys],
        alignment: int,
        *,
        num_ranks: int = 1,
        drops_last_block: bool = False,
        lease_s: float = 300.0,
        listener: Any = None,
    ) -> None:
        self.index = index
        index.listener = listener
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self._hit_blocks = {tier.medium: 0 for tier in index.tiers}  # also of a tier that is lost
        self.block_pool: Any = None
        self._groups = list(groups)
        self._alignment = alignment
        self._num_ranks = num_ranks
        self._lease_s = lease_s
        self._listener = listener
        self._prefixes = TierPrefixes(index.list_indexes, self._groups, alignment, drops_last_block)
        self._get_block_ids: Callable[[RequestId], Sequence[Sequence[BlockId]]]
        self._max_reading = 0
        self._followed: dict[RequestId, FollowedRequest] = {}
        self._hits: dict[RequestId, HeldHit] = {}
        self._loading: dict[RequestId, HeldHit] = {}
        self._storing: dict[int, RunningStore] = {}  # by order, oldest first
        self._orders = StepOrders()

    def bind(
        self, block_pool: Any, get_block_ids: Callable[[RequestId], Sequence[Sequence[BlockId]]]
    ) -> None:
        """Set the engine's pool, and the function that returns a request's block table of each group."""
        self.block_pool = block_pool
        self._get_block_ids = get_block_ids
        # Blocks that are read cannot be reused; leave half of the pool to the requests.
        self._max_reading = max(1, min(self.index.host.capacity // 2, block_pool.num_gpu_blocks // 2))

    # ---- loading ---------------------------------------------------------------------------------

    def find_hit(self, request: Any, num_device_tokens: int) -> int:
        """Return how many tokens the tiers have after the first `num_device_tokens` of a request.

        At least the last token is left to compute. The blocks found are held until `plan_load`, the next call
        for this request, or its end.
        """
        request_id = request.request_id
        self._drop_hit(request_id)
        num_tokens = sum(self._prefixes.find(request, num_device_tokens, request.num_tokens - 1).values())
        if num_tokens:
            self._hits[request_id] = self._hold_hit(request, num_device_tokens, num_tokens)
        return num_tokens

    def plan_load(self, request: Any, block_ids: Sequence[Sequence[BlockId]], num_tokens: int) -> None:
        """Order the load of the first `num_tokens` tokens of a request's hit into its blocks.

        Call it for each allocation, with 0 tokens if nothing is to be loaded.
        """
        request_id = request.request_id
        self._followed.setdefault(request_id, FollowedRequest(request, [0] * len(self._groups)))
        if not num_tokens:
            self._drop_hit(request_id)
        hit = self._hits.pop(request_id, None)
        if hit is None:
            return
        if num_tokens != hit.num_tokens:  # the engine took less; a shorter hit may need other blocks
            shorter = self._hold_hit(request, hit.start, num_tokens)
            self.index.release(hit.list_keys())
            hit = shorter
        null_id = self.block_pool.null_block.block_id
        blocks = {
            key: table[position]
            for row, table in zip(hit.rows, block_ids, strict=True)
            for position, key in row.items()
            if table[position] != null_id
        }
        for key in blocks:
            level = self.index.find_tier(key)
            if level is not None:
                tier = self.index.tiers[level]
                tier.read([key])  # counts it
                self._hit_blocks[tier.medium] += 1
        self._loading[request_id] = hit
        self._orders.loads.append(LoadOrder(request_id, blocks))

    def count_hit_tokens(self, request: Any) -> tuple[int, int]:
        """Return how many tokens of a request's load come from host memory, and how many from disk.

        Tokens count for host memory only if the blocks of all groups are there.
        """
        hit = self._loading.get(request.request_id)
        if hit is None:
            return 0, 0
        counts = self._prefixes.find_all(request, hit.start, hit.start + hit.num_tokens)
        return counts.get(0, 0), counts.get(1, 0)

    def end_loads(self, request_ids: Iterable[RequestId]) -> None:
        """Release what finished loads have read, successful or not."""
        for request_id in request_ids:
            hit = self._loading.pop(request_id, None)
            if hit is not None:
                self.index.release(hit.list_keys())
                self._counts["loaded tokens"] += hit.num_tokens

    # ---- storing ---------------------------------------------------------------------------------

    def take_orders(self, request_ids: Iterable[RequestId]) -> StepOrders:
        """Plan the stores of these scheduled requests, and return the orders of the step.

        Blocks are stored once their tokens are computed, that is, at the earliest in the following step.
        """
        if isinstance(self.block_pool, BlockPoolCore):
            self.block_pool.expire_holds()
        for request_id in request_ids:
            followed = self._followed.get(request_id)
            if followed is not None and self._count_storable(followed.request) >= followed.next_at:
                self._store_new_blocks(followed, self._get_block_ids(request_id))
        orders, self._orders = self._orders, StepOrders()
        return orders

    def finish_request(self, request: Any, block_ids: Sequence[Sequence[BlockId]]) -> None:
        """Store the last blocks of a request that has ended for any reason, before its blocks are freed.

        A load that was ordered is not cancelled: it is reported when it has ended.
        """
        request_id = request.request_id
        self._drop_hit(request_id)
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        num_tokens = self._count_storable(request)
        if num_tokens >= followed.next_at:
            self._counts["skipped blocks"] += self._store_new_blocks(followed, block_ids)
        for group in self._groups:
            # The first block is used last: without it, the blocks after it are useless.
            keys = group.list_keys(request, 0, group.count_blocks(request, num_tokens))
            keys.reverse()
            if self._storing:
                next(reversed(self._storing.values())).used_after += keys
            else:
                self.index.touch(keys)

    def apply_report(self, report: WorkerReport) -> None:
        """Apply what the workers report: finished stores, losses, and the blocks found on disk."""
        if report.has_lost_disk and self.index.disk is not None:
            self.index.drop_last_tier()
        if report.reopened is not None:
            left_out = self.index.add_reopened(report.reopened)
            self._orders.forgotten += left_out
            if report.reopened:
                num_found = len(report.reopened) - len(left_out)
                _logger.info("kv_pool found %d blocks on disk", num_found)
        self._forget([*report.lost, *report.partly_reopened])
        for order_id, num_ranks in report.stored.items():
            self._storing[order_id].num_ranks += num_ranks
            if self._storing[order_id].num_ranks == self._num_ranks:
                self._end_store(self._storing.pop(order_id))

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call, by the names in `COUNTS`; 0 is left out."""
        new = self._counts - self._reported
        self._reported += new
        return dict(new)

    def get_report(self, num_device_hits: int) -> TierList:
        """Return what `kv-pool tiers` shows. Any thread may call it.

        Args:
            num_device_hits: blocks that requests hit in the pool itself.
        """
        tiers = [tier.get_statistics() for tier in self.index.tiers]
        num_dropped = self._counts["skipped blocks"] + self._counts["lost blocks"]
        return TierList({MEDIUM_GPU: num_device_hits} | self._hit_blocks, tiers, num_dropped)

    def has_work(self) -> bool:
        """Return True while stores or removals are not finished; the engine must go on stepping."""
        return bool(self._storing) or self._orders != StepOrders()

    def holds_freed_blocks(self) -> bool:
        """Return True if a finished store would free blocks. O(blocks being read)."""
        blocks = self.block_pool.blocks
        return any(
            blocks[block_id].ref_cnt == 1
            for store in self._storing.values()
            for block_id in store.order.blocks.values()
        )

    def reset(self) -> bool:
        """Remove everything from the tiers. While loads are not finished, return False and change nothing."""
        if self._loading:
            _logger.warning("kv_pool did not clear its tiers: %d requests are loading", len(self._loading))
            return False
        for request_id in list(self._hits):
            self._drop_hit(request_id)
        self.index.clear()
        # Stores that are ordered already are executed before the removal.
        self._orders.clears = True
        for followed in self._followed.values():
            followed.num_seen = [0] * len(self._groups)
            followed.next_at = 0
        return True

    # ---- inside ----------------------------------------------------------------------------------

    def _hold_hit(self, request: Any, start: int, num_tokens: int) -> HeldHit:
        hit = HeldHit(start, num_tokens, self._prefixes.list_blocks(request, start, start + num_tokens))
        self.index.hold(hit.list_keys())
        return hit

    def _drop_hit(self, request_id: RequestId) -> None:
        hit = self._hits.pop(request_id, None)
        if hit is not None:
            self.index.release(hit.list_keys())

    def _count_storable(self, request: Any) -> int:
        """Return how many tokens of a request are computed and may have hashed blocks in all groups.

        Called in each step. At `FollowedRequest.next_at`, there may be blocks that are not stored.
        Tokens of steps in flight do not count. The engine hashes the blocks of several groups together, at
        multiples of the alignment.
        """
        num_tokens: int = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        return num_tokens - num_tokens % self._alignment

    def _store_new_blocks(self, followed: FollowedRequest, block_ids: Sequence[Sequence[BlockId]]) -> int:
        """Plan the store of a request's computed blocks that host memory does not have.

        Returns:
            The number of blocks for which there is no place now.
        """
        request = followed.request
        num_skipped = 0
        num_tokens = self._count_storable(request)
        for number, (group, table) in enumerate(zip(self._groups, block_ids, strict=True)):
            start = followed.num_seen[number]
            end = min(group.count_blocks(request, num_tokens), len(table))
            keys = group.list_keys(request, start, end)
            found = [
                (start + place, self._find_block(keys[place], table[start + place], group))
                for place in self.index.find_missing(keys)
            ]
            stored = [(place, block) for place, block in found if block is not None]
            if not stored:
                followed.num_seen[number] = max(start, end)
                continue
            num_taken = self._order_store(group, request, stored)
            # Blocks that found no place are tried again in the next step.
            followed.num_seen[number] = end if num_taken == len(stored) else stored[num_taken][0]
            num_skipped += len(stored) - num_taken
        num_done = min(
            num_seen * group.block_size
            for group, num_seen in zip(self._groups, followed.num_seen, strict=True)
        )
        followed.next_at = (num_done // self._alignment + 1) * self._alignment
        return num_skipped

    def _find_block(self, key: BlockHashWithGroupId, block_id: BlockId, group: GroupKeys) -> Any:
        """Return the block that has this content, or None.

        A block that has left a window is no longer in the table, but may still be cached.
        """
        block = self.block_pool.blocks[block_id]
        if block.block_hash == key:
            return block
        cached = self.block_pool.get_cached_block(key[:-4], [group.group_id])
        return cached[0] if cached and cached[0].block_hash == key else None

    def _order_store(self, group: GroupKeys, request: Any, found: list[tuple[int, Any]]) -> int:
        """Order the store of blocks, given with their positions. Return how many of them are stored."""
        blocks = {block.block_hash: block.block_id for _, block in found}
        num_reading = sum(len(store.order.blocks) for store in self._storing.values())
        order = self.index.plan_store(blocks, self._max_reading - num_reading)
        if order is None:
            return 0
        num_taken = len(order.blocks)
        taken = [block for _, block in found[:num_taken]]
        self._storing[order.order_id] = RunningStore(order, self._hold(taken, order.order_id))
        self._orders.stores.append(order)
        self._counts["demoted blocks"] += len(order.list_demoted())
        if self._listener is not None:
            for place, block in found[:num_taken]:
                self._listener.on_planned(request, group, place, block.block_hash)
        return num_taken

    def _hold(self, blocks: list[Any], order_id: int) -> Any:
        """Keep cached blocks from being reused while a store reads them. Return what `_release` takes.

        In kv_pool's pool this is a hold with a deadline, which `kv-pool sequences --holds` lists; in vLLM's,
        references. At the end the last block is freed first, as if the request had freed them.
        """
        if isinstance(self.block_pool, BlockPoolCore):
            until = self.block_pool.holds.clock() + self._lease_s
            reason = f"leased to kv_pool's tiers, store {order_id} (read)"
            return self.block_pool.hold(blocks, reason, until=until)
        self.block_pool.touch(blocks)
        return blocks

    def _release(self, hold: Any) -> bool:
        """End a hold. Return False if it had expired, so that the blocks may have been reused."""
        if not isinstance(hold, Hold):
            self.block_pool.free_blocks(reversed(hold))
        elif hold.is_released:
            return False
        else:
            hold.release()
        return True

    def _end_store(self, store: RunningStore) -> None:
        order = store.order
        is_valid = self._release(store.hold)
        keys = self.index.finish_store(order, is_valid)
        self._counts["stored blocks"] += len(keys)
        self.index.touch(store.used_after)
        if not is_valid:
            _logger.warning(
                "kv_pool drops %d stored blocks: the store took longer than lease_s, %s seconds",
                len(order.blocks),
                self._lease_s,
            )
            self._forget(list(order.blocks))

    def _forget(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Remove keys from the index, and order their removal from the tiers."""
        if keys:
            self._counts["lost blocks"] += len(keys)
            self.index.remove(keys)
            self._orders.forgotten += keys
