"""`TierOnboarder`: starts requests with prefixes from lower tiers; `OnboardPlan`: the start of one."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import msgspec

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.freeing import free_listed
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.ids import RequestId
from kv_pool.manager.admission import limit_tokens
from kv_pool.manager.allocating import cache_step
from kv_pool.manager.block_groups.block_group import CachedPrefix
from kv_pool.manager.block_groups.block_table import BlockTable
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.tiers.open_plans import OpenPlans, PlanState, TwoPhasePlan, list_tail_first
from kv_pool.tiers.tier_prefixes import GroupKeys, TierPrefixes
from kv_pool.tiers.tiered_cache import TieredCache


class TierHit(NamedTuple):
    """The part of a request's prefix that lower tiers have, directly after the part on the device.

    Attributes:
        request_id: the request.
        num_device_tokens: number of tokens before it, which are on the device.
        num_tokens: number of tokens that the tiers have; 0 for a miss.
        num_tokens_by_medium: these tokens, counted under the lowest tier that must be read for them. Lists
            the media of all tiers.
    """

    request_id: RequestId
    num_device_tokens: int
    num_tokens: int
    num_tokens_by_medium: dict[str, int]


class OnboardPlan(TwoPhasePlan):
    """A plan to load blocks from lower tiers for a request, made by `TierOnboarder.plan_onboard`.

                 commit                              abort
        OPEN --> request has blocks, prefix cached   request has no blocks; call find_prefix again

    While the plan is open, no tier evicts the blocks to be read. From `detach` on, the manager does not know
    the request, and the plan owns and holds the device blocks.

    Attributes:
        request_id: the request.
        hit: the hit that the plan loads.
        num_computed_tokens: number of tokens with valid KV after the commit; the caller sets the request's
            `num_computed_tokens` to it.
        keys: the keys of the blocks to be read.
        state: open, committed or aborted.
        is_unreadable: True if a block could not be read.
    """

    def __init__(self, onboarder: TierOnboarder, request: SchedulableRequest, hit: TierHit) -> None:
        purpose = f"load blocks for request {request.request_id!r}"
        end = hit.num_device_tokens + hit.num_tokens
        super().__init__(request, end, onboarder._plans, purpose)
        self.hit = hit
        self._rows = onboarder._prefixes.list_blocks(request, hit.num_device_tokens, end)
        self.keys = [key for row in self._rows for key in row.values()]
        self.is_unreadable = False
        self._is_loaded = False
        self._statistics = onboarder._statistics
        self._manager = onboarder.manager
        self._tiered_cache = onboarder.tiered_cache
        self._tables: list[BlockTable] = []
        self._targets: list[KVCacheBlock] = []  # for each key

    def open(self, cached_prefix: CachedPrefix | None, num_new_tokens: int, options: dict[str, Any]) -> bool:
        """Hold the keys and give the request its blocks; return False if the pool has too few.

        What `allocate_slots` refuses has changed nothing. After any other exception, until the plan is
        detached or closed, a repair aborts it.

        Args:
            options: for `allocate_slots`.
        """
        manager = self._manager
        self._plans.running = self, PlanState.ABORTED
        self._tiered_cache._stack.hold(self.keys)  # first: tiers make room for the blocks' content
        try:
            taken = manager.allocate_slots(
                self._request,
                num_new_tokens,
                cached_prefix,
                num_external_computed_tokens=self.hit.num_tokens,
                delay_cache_blocks=True,  # the commit caches them
                **options,
            )
        except Exception:
            if not manager.block_pool.is_changing:
                self._drop_keys()
            raise
        if taken is None:
            self._drop_keys()
            return False
        self._tables = tables = manager._tables[self.request_id]
        self._targets = [
            table.blocks[position] for table, row in zip(tables, self._rows, strict=True) for position in row
        ]
        self._watch(self.list_blocks())
        self.state = PlanState.OPEN
        return True

    def detach(self) -> None:
        """Take the tables out of the manager: the caller decides when to close the plan."""
        self._plans.begin(self, PlanState.ABORTED)
        self._manager.pop_tables(self.request_id)
        self._hold(self._manager, self.list_blocks())
        self._plans.end(self, PlanState.OPEN)

    def list_blocks(self) -> list[KVCacheBlock]:
        """Return the device blocks of the plan, the first to be reused first."""
        return list_tail_first([table.blocks for table in self._tables])

    def apply(self) -> bool:
        """Load the blocks and commit; abort on failure.

        Returns:
            False if a block could not be read, or its content was invalidated. The plan is aborted, and the
            next `find_prefix` returns a shorter prefix or none.
        Raises:
            PlanClosedError: the plan is already committed or aborted.
            CopyFailedError: copying to the device failed. The plan is aborted.
            Others as in `commit`. The plan is aborted.
            Any other exception, of a tier for example, that leaves the pool interrupted. After its `repair`
            the plan is open, or committed if it was raised within the commit.
        """
        self._check_open()
        return self._apply(self.num_computed_tokens)

    def load(self) -> bool:
        """Read the bytes into the device blocks. The copies are complete on return.

        First offloads the old content of the newly allocated blocks (`flush_evicted`).

        Returns:
            False if a block could not be read, or was invalidated; the caller then aborts the plan.
        Raises:
            PlanClosedError: the plan is already committed or aborted.
            CopyFailedError: copying to the device failed.
        """
        self._check_open()
        self._is_loaded = self._load()
        return self._is_loaded

    def commit(self) -> None:
        """Assign the loaded blocks to the request and cache its prefix on the device.

        Raises:
            PlanClosedError: the plan is already committed or aborted.
            InvalidBlockError: the blocks are not loaded, or the content of one was invalidated since, on the
                device or in a tier. Abort the plan.
            InvalidArgumentError, InvalidTypeError: the request has got blocks in the meantime, or lacks
                fields that events need. In all cases nothing has changed.
        """
        self._check_open()
        if not self._is_loaded or self._is_invalid() or not self._tiered_cache.has_all(self.keys):
            raise InvalidBlockError(
                f"the blocks for request {self.request_id!r} are not all loaded, or were invalidated since; "
                "abort the plan and call find_prefix() again"
            )
        self._commit(self.num_computed_tokens)

    def abort(self) -> None:
        """Free the plan's device blocks. None of the loaded content can be hit.

        Raises:
            PlanClosedError: the plan is already committed or aborted. Nothing has changed.
        """
        self._check_open()
        self._give_back()

    # ---- what the methods above do with a plan that is open ------------------------------------------

    def _apply(self, num_to_cache: int) -> bool:
        """Load and commit, or abort."""
        try:
            is_loaded = self._load()
            if is_loaded:
                self._commit(num_to_cache)
        except Exception:
            if self.state is PlanState.OPEN and not self._manager.block_pool.is_changing:
                self._give_back()
            raise
        if not is_loaded:
            self._give_back()
        return is_loaded

    def _load(self) -> bool:
        failed = self._tiered_cache.load(self.keys, [block.block_id for block in self._targets])
        self.is_unreadable = bool(failed)
        return not failed and not self._is_invalid()

    def _commit(self, num_to_cache: int) -> None:
        """Commit the loaded blocks.

        Args:
            num_to_cache: tokens whose full blocks are cached: those with valid KV, and perhaps those that
                the request's next step computes.
        """
        manager, tables, num_loaded = self._manager, self._tables, self.num_computed_tokens
        if self._holds:  # the plan is detached
            self._check_absent(manager)
        num_tokens = min(limit_tokens(manager, num_to_cache), tables[0].num_valid_tokens)
        ends = manager.caching.find_ends(self._request, tables, 0, num_tokens)
        self._plans.begin(self, PlanState.COMMITTED)
        if self._holds:
            manager.put_tables(self.request_id, tables)
            self._settle(manager)
        if ends is not None:  # before tiers may evict the keys
            cache_step(manager, self._request, tables, ends, num_tokens, num_loaded, num_loaded)
        self._tiered_cache._stack.release(self.keys)
        self._plans.end(self, PlanState.COMMITTED)
        counts = self._statistics
        counts.num_committed += 1
        counts.num_tokens_by_medium[MEDIUM_GPU] += self.hit.num_device_tokens
        for medium, num_hit in self.hit.num_tokens_by_medium.items():
            counts.num_tokens_by_medium[medium] += num_hit

    def _give_back(self) -> None:
        """Abort: free the blocks and release the keys."""
        manager, blocks = self._manager, self.list_blocks()
        self._plans.begin(self, PlanState.ABORTED)
        if self._holds:
            manager.forget_tables(self.request_id)
            self._settle(None)
        else:
            del manager._tables[self.request_id]
            manager.copies.drop(blocks)
            free_listed(manager.block_pool, blocks)
        self._tiered_cache._stack.release(self.keys)
        self._plans.end(self, PlanState.ABORTED)
        self._statistics.num_aborted += 1
        self._statistics.num_unreadable += self.is_unreadable

    def _drop_keys(self) -> None:
        """Abort a plan that has no blocks."""
        self._tiered_cache._stack.release(self.keys)
        self._plans.running = None

    def repair(self, state: PlanState) -> None:
        manager = self._manager
        if state is PlanState.COMMITTED:
            if not manager.holds_blocks(self.request_id):
                manager.put_tables(self.request_id, self._tables)
        else:
            manager.forget_tables(self.request_id)
            if not self._holds:
                manager._tables.pop(self.request_id, None)
        super().repair(state)
        others = [plan for plan in self._plans.by_request.values() if plan is not self]
        self._tiered_cache._stack.hold_only([key for plan in others for key in plan.keys])

    def __repr__(self) -> str:
        return (
            f"OnboardPlan({self.request_id!r}, {self.state.value}, {len(self.keys)} blocks, "
            f"{self.hit.num_tokens} tokens)"
        )


class AdmittableRequest(SchedulableRequest, Protocol):
    """A request whose `num_computed_tokens` can be set."""

    num_computed_tokens: int


class OnboardStatistics(msgspec.Struct):
    """Counts of the prefix tokens that requests started with, and of plans.

    Attributes:
        num_tokens_by_medium: number of tokens, for GPU (prefixes on the device) and each tier's medium.
        num_committed, num_aborted: number of plans.
        num_unreadable: number of plans that were aborted because a block could not be read.
    """

    num_tokens_by_medium: dict[str, int]
    num_committed: int = 0
    num_aborted: int = 0
    num_unreadable: int = 0


class TierOnboarder:
    """Finds prefixes in the lower tiers of a manager's pool and onboards them into the blocks of requests.

        found = onboarder.admit(request)
        if found is not None:
            print(found["GPU"], "tokens were on the device,", found["CPU"], "come from host memory")

    `admit` does everything in one call. Its steps can be called separately: the manager's
    `get_computed_blocks`, `find_prefix`, then `plan_onboard` or `allocate_slots`.

    All KV cache groups take part. Of groups with windows, chunks or states, only the blocks that the next
    token attends to are read.

    Args:
        manager: the manager of the requests.
        tiered_cache: the tiers of the manager's pool.

    `manager.take_events()` returns the events of tiers together with the pool's, in order and labelled with
    their medium. Not thread-safe.
    """

    def __init__(self, manager: KVCacheManager, tiered_cache: TieredCache) -> None:
        if tiered_cache.block_pool is not manager.block_pool:
            raise InvalidArgumentError("the tiers belong to another pool than the manager's")
        self.manager = manager
        self.tiered_cache = tiered_cache
        groups = []
        for group in manager._groups:
            if group.is_cacheable:
                tiered_cache.note_block_size(group.group_id, group.block_size)
            skip = group.count_skipped_tokens if group.forgets else None
            groups.append(GroupKeys(group.group_id, group.block_size, group.stride, skip, group.is_cacheable))
        drops_last = any(group.drops_hits for group in manager._groups)
        self._prefixes = TierPrefixes(tiered_cache.list_indexes, groups, manager.alignment, drops_last)
        self._plans: OpenPlans[OnboardPlan] = OpenPlans(manager.block_pool)
        self._media = [tier.medium for tier in tiered_cache.tiers]
        self._statistics = OnboardStatistics(dict.fromkeys([MEDIUM_GPU, *self._media], 0))

    # ---- looking ---------------------------------------------------------------------------------

    def find_prefix(
        self,
        request: SchedulableRequest,
        cached_prefix: CachedPrefix | None = None,
        max_num_tokens: int | None = None,
    ) -> TierHit:
        """Return the prefix tokens that lower tiers have beyond the device's. Changes nothing.

        Args:
            cached_prefix: the result of `get_computed_blocks`; None for an empty prefix. Nothing follows one
                that ends within a block; `find_both` then also looks behind a shorter one.
            max_num_tokens: limit for prefix and hit together; by default all tokens of the request but the
                last.
        Cost: O(blocks), one dictionary look-up per block and tier; more if windows require several lengths
            to be tried.
        """
        start = 0 if cached_prefix is None else cached_prefix.num_tokens
        limit = self.manager._find_limit(request, max_num_tokens)
        found = {} if limit is None else self._prefixes.find(request, start, limit)
        by_medium = dict.fromkeys(self._media, 0)
        for level, num_tokens in found.items():
            by_medium[self._media[level]] += num_tokens
        return TierHit(request.request_id, start, sum(found.values()), by_medium)

    def find_both(
        self, request: SchedulableRequest, max_num_tokens: int | None = None
    ) -> tuple[CachedPrefix, TierHit]:
        """Return the cached prefix of a request and what lower tiers have beyond it. Changes nothing.

        A prefix that ends within a block is replaced by a shorter one if tiers then reach further.

        Args:
            max_num_tokens: as of `find_prefix`.
        """
        prefix = self.manager.get_computed_blocks(request, max_num_tokens)
        hit = self.find_prefix(request, prefix, max_num_tokens)
        num_beyond = prefix.num_tokens % self.manager.alignment
        if num_beyond:
            shorter = self.manager.get_computed_blocks(request, prefix.num_tokens - num_beyond)
            longer = self.find_prefix(request, shorter, max_num_tokens)
            if shorter.num_tokens + longer.num_tokens > prefix.num_tokens:
                return shorter, longer
        return prefix, hit

    def list_open_plans(self) -> list[OnboardPlan]:
        """Return the plans that are neither committed nor aborted, oldest first."""
        return list(self._plans.by_request.values())

    def get_statistics(self) -> OnboardStatistics:
        """Return a copy of the current counts."""
        counts = self._statistics
        return msgspec.structs.replace(counts, num_tokens_by_medium=dict(counts.num_tokens_by_medium))

    # ---- reading ---------------------------------------------------------------------------------

    def admit(
        self,
        request: AdmittableRequest,
        num_new_tokens: int | None = None,
        *,
        max_prefix_tokens: int | None = None,
        delay_cache_blocks: bool = False,
        **options: Any,
    ) -> dict[str, int] | None:
        """Allocate blocks for a request, reusing prefixes from the device and from lower tiers.

            |<- device ->|<- tiers ->|<- num_new_tokens ->|
            |  touched   |   read    |   to be computed   |

        Args:
            request: has no blocks yet. Its `num_computed_tokens` is set to the length of the reused prefix.
            num_new_tokens: maximum number of tokens to allocate slots for; None for all remaining tokens.
            max_prefix_tokens: maximum length of the reused prefix; None for all tokens but the last.
            delay_cache_blocks: do not cache the blocks to be computed now; `cache_blocks` does so later.
            options: for `allocate_slots`, such as `num_lookahead_tokens`; not `num_external_computed_tokens`.
        Returns:
            The number of reused tokens by medium; their sum is `num_computed_tokens`. None if the pool has
            too few blocks; nothing has changed, unless a block could not be read.
        Raises:
            CopyFailedError: copying to the device failed. The request has no blocks.
            What `get_computed_blocks`, `plan_onboard` and `allocate_slots` raise; nothing has changed.
            Any other exception interrupts the call: the next one raises PoolInterruptedError until the
            manager's `repair`, which aborts the plan of this call.
        A block that cannot be read is removed from its tier, and the request starts with a shorter prefix.
        """
        self._check_absent(request)
        if "num_external_computed_tokens" in options:
            raise InvalidArgumentError(
                "num_external_computed_tokens is no option of admit, which takes these tokens from the tiers"
            )
        while True:
            prefix, hit = self.find_both(request, max_prefix_tokens)
            num_found = prefix.num_tokens + hit.num_tokens
            num_left = request.num_tokens - num_found
            num_new = num_left if num_new_tokens is None else min(num_new_tokens, num_left)
            if not hit.num_tokens:
                taken = self.manager.allocate_slots(
                    request, num_new, prefix, delay_cache_blocks=delay_cache_blocks, **options
                )
                if taken is None:
                    return None
                self.note_started(prefix)
                break
            num_to_cache = num_found
            if not delay_cache_blocks:
                num_to_cache += num_new
                # Now, since this raises what the commit would raise.
                self.manager.caching.find_ends(request, None, prefix.num_tokens, num_to_cache)
            plan = OnboardPlan(self, request, hit)
            if not plan.open(prefix, num_new, options):  # holds the keys, then takes the blocks
                return None
            # Reads the bytes, caches the blocks and releases the keys.
            if plan._apply(num_to_cache):
                break
            # The plan is aborted. Tiers have dropped what was unreadable or invalid: the next hit is shorter.
        request.num_computed_tokens = num_found
        return {MEDIUM_GPU: prefix.num_tokens, **hit.num_tokens_by_medium}

    def plan_onboard(
        self,
        request: SchedulableRequest,
        hit: TierHit,
        cached_prefix: CachedPrefix | None = None,
        *,
        num_new_tokens: int = 0,
        **options: Any,
    ) -> OnboardPlan | None:
        """Plan to start a request with a prefix from the device followed by a hit in lower tiers.

            |<- cached_prefix ->|<- hit ->|<- num_new_tokens ->|
            |   touched         |  read   |   to be computed   |

        Args:
            hit: the result of `find_prefix` for the same prefix.
            num_new_tokens: tokens to allocate slots for; more can be allocated after the commit.
            options: for `allocate_slots`, such as `num_lookahead_tokens`.
        Returns:
            The plan; None if `allocate_slots` returns None. Then nothing has changed.
        Raises:
            InvalidArgumentError: the hit is empty, or for another request or prefix; or the request already
                has blocks or an open plan. Nothing has changed.
            InvalidBlockError: the tiers no longer have the whole hit; call `find_prefix` again. Nothing has
                changed.
        """
        request_id = self._check_absent(request)
        num_device_tokens = 0 if cached_prefix is None else cached_prefix.num_tokens
        if hit.num_tokens < 1 or hit[:2] != (request_id, num_device_tokens):
            raise InvalidArgumentError(
                f"the hit has {hit.num_tokens} tokens after {hit.num_device_tokens} of request "
                f"{hit.request_id!r}; this is request {request_id!r} with {num_device_tokens} on the device"
            )
        end = num_device_tokens + hit.num_tokens
        plan: OnboardPlan | None = None
        if end <= len(request.block_hashes) * self.manager.block_pool.hash_block_size:
            plan = OnboardPlan(self, request, hit)
        if plan is None or not self.tiered_cache.has_all(plan.keys):
            raise InvalidBlockError(
                f"the tiers do not have all of tokens {num_device_tokens} to {end} of request "
                f"{request_id!r}; call find_prefix() again"
            )
        if not plan.open(cached_prefix, num_new_tokens, options):
            return None
        plan.detach()
        return plan

    def note_started(self, cached_prefix: CachedPrefix) -> None:
        """Count a request that starts with a prefix from the device only."""
        self._statistics.num_tokens_by_medium[MEDIUM_GPU] += cached_prefix.num_tokens

    # ---- prefetching -----------------------------------------------------------------------------

    def prefetch(self, request: SchedulableRequest) -> int:
        """Read a waiting request's blocks from disk into host memory, in a background thread.

        Returns:
            The number of blocks that are being read for the request; 0 if none is on disk only, or if the
            limit on prefetched blocks is reached.
        A later `TieredCache.flush()` moves the blocks to host memory. A block that cannot be read is counted.
        """
        _, hit = self.find_both(request)
        start, end = hit.num_device_tokens, hit.num_device_tokens + hit.num_tokens
        keys = [key for row in self._prefixes.list_blocks(request, start, end) for key in row.values()]
        return self.tiered_cache.prefetch(request.request_id, keys)

    def cancel_prefetch(self, request_id: RequestId) -> None:
        """Cancel the prefetch of a request. No-op if there is none."""
        self.tiered_cache.cancel_prefetch(request_id)

    # ---- inside ----------------------------------------------------------------------------------

    def _check_absent(self, request: SchedulableRequest) -> RequestId:
        """Return the request's id. Raise unless it has neither an open plan nor blocks."""
        request_id = self._plans.check_none_open(request)
        if self.manager.holds_blocks(request_id):
            raise InvalidArgumentError(f"request {request_id!r} has blocks already; free them first")
        return request_id
