"""`TierReadBack`: lets requests of a manager start with prefixes that colder tiers have."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import msgspec

from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.errors import InvalidArgumentError, InvalidBlockError
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.make_group import make_group
from kv_pool.manager.cached_prefix import CachedPrefix
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.requests.request import SchedulableRequest
from kv_pool.manager.swap.open_plans import OpenPlans, PlanState
from kv_pool.tiers.read_back_plan import ReadBackPlan
from kv_pool.tiers.tier_hit import TierHit
from kv_pool.tiers.tier_prefixes import TierPrefixes
from kv_pool.tiers.tiered_cache import TieredCache


class AdmittableRequest(SchedulableRequest, Protocol):
    """A request that is told how much of it is computed."""

    num_computed_tokens: int


class ReadBackStatistics(msgspec.Struct):
    """What requests started with.

    Attributes:
        num_tokens_by_medium: GPU for prefixes on the device, and the media of the tiers.
        num_committed, num_aborted: plans.
        num_unreadable: plans that were aborted since a block could not be read.
    """

    num_tokens_by_medium: dict[str, int]
    num_committed: int = 0
    num_aborted: int = 0
    num_unreadable: int = 0


class TierReadBack:
    """Finds prefixes in the tiers of a manager's pool, and reads them into blocks of requests.

        found = read_back.admit(request)
        if found is not None:
            print(found["GPU"], "tokens were on the device,", found["CPU"], "come from host memory")

    `admit` is all of it. In pieces: `get_computed_blocks` of the manager, `find_prefix`, `plan_read_back` or
    `allocate_slots`.

    All KV cache groups take part, those with windows, chunks or states as well: of these only the blocks are
    read that the next token attends to.

    Args:
        manager: whose requests they are.
        tiered_cache: of the manager's pool.

    Events of tiers come among the pool's own, so `manager.take_events()` has them, labelled and in order.
    Not safe for several threads.
    """

    def __init__(self, manager: KVCacheManager, tiered_cache: TieredCache) -> None:
        if tiered_cache.block_pool is not manager.block_pool:
            raise InvalidArgumentError("the tiers are those of another pool than the manager's")
        self.manager = manager
        self.tiered_cache = tiered_cache
        self._groups: list[BlockGroup] = [
            make_group(spec, manager.block_pool, group_id, manager.alignment)
            for group_id, spec in enumerate(manager.groups)
        ]
        for group_id, spec in enumerate(manager.groups):
            if spec.is_cacheable:
                tiered_cache.note_block_size(group_id, spec.block_size)
        self._prefixes = TierPrefixes(tiered_cache, self._groups, manager.alignment)
        self._open_plans: OpenPlans[ReadBackPlan] = OpenPlans()
        self._media = [tier.medium for tier in tiered_cache.tiers]
        self._statistics = ReadBackStatistics(dict.fromkeys([MEDIUM_GPU, *self._media], 0))

    # ---- looking ---------------------------------------------------------------------------------

    def find_prefix(
        self,
        request: SchedulableRequest,
        cached_prefix: CachedPrefix | None = None,
        max_num_tokens: int | None = None,
    ) -> TierHit:
        """What the request could have from tiers after its prefix on the device. Only looks.

        Args:
            cached_prefix: what `get_computed_blocks` found; None for nothing.
            max_num_tokens: prefix and hit together cover no more than this; by default all tokens of the
                request but the last.
        Cost: O(blocks), a dictionary look-up for each and tier; more where windows make it try lengths.
        """
        start = 0 if cached_prefix is None else cached_prefix.num_tokens
        limit = request.num_tokens - 1 if max_num_tokens is None else max_num_tokens
        num_tokens = self._prefixes.count_tokens(request, start, limit)
        by_medium = dict.fromkeys(self._media, 0)
        if num_tokens:
            self._count_by_medium(request, start, start + num_tokens, by_medium)
        return TierHit(request.request_id, start, num_tokens, by_medium)

    def list_open_plans(self) -> list[ReadBackPlan]:
        """Plans that were neither committed nor aborted, oldest first."""
        self._open_plans.recover()
        return list(self._open_plans.by_request.values())

    def list_device_ids_in_flight(self) -> list[int]:
        """Ids of the device blocks that open plans use; the plans hold them in place (`BlockPool.holds`)."""
        return [block.block_id for plan in self.list_open_plans() for block in plan.list_blocks()]

    def get_statistics(self) -> ReadBackStatistics:
        """What requests started with so far, as of now."""
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
        """Let a request start: with what the device has of it, what tiers have after that, and new blocks.

            |<- device ->|<- tiers ->|<- num_new_tokens ->|
            |  touched   |   read    |   to be computed   |

        Args:
            request: without blocks. Its `num_computed_tokens` is set: so many need not be computed.
            num_new_tokens: slots for no more tokens to be computed than this; None for all that are left.
            max_prefix_tokens: start with no more than this; None for all tokens but the last.
            delay_cache_blocks: blocks that are to be computed become findable by `cache_blocks`, and not now.
            options: for `allocate_slots`, such as `num_lookahead_tokens`.
        Returns:
            How many tokens come from where, by medium; their sum is `num_computed_tokens`. None if there is
            no room, with nothing changed.
        Raises:
            CopyFailedError: the device did not take the bytes. The request has no blocks.
            What `get_computed_blocks`, `plan_read_back` and `allocate_slots` raise, with nothing changed.
        What can not be read is not found any more, and the request starts with what is left.
        """
        while True:
            prefix = self.manager.get_computed_blocks(request, max_prefix_tokens)
            hit = self.find_prefix(request, prefix, max_prefix_tokens)
            num_found = prefix.num_tokens + hit.num_tokens
            num_left = request.num_tokens - num_found
            num_new = num_left if num_new_tokens is None else min(num_new_tokens, num_left)
            if not hit.num_tokens:
                options["delay_cache_blocks"] = delay_cache_blocks
                if self.manager.allocate_slots(request, num_new, prefix, **options) is None:
                    return None
                self.note_started(prefix)
                break
            plan = self.plan_read_back(request, hit, prefix, num_new_tokens=num_new, **options)
            if plan is None:
                return None
            if plan.apply():
                break
        request.num_computed_tokens = num_found
        return {MEDIUM_GPU: prefix.num_tokens, **hit.num_tokens_by_medium}

    def plan_read_back(
        self,
        request: SchedulableRequest,
        hit: TierHit,
        cached_prefix: CachedPrefix | None = None,
        *,
        num_new_tokens: int = 0,
        **options: Any,
    ) -> ReadBackPlan | None:
        """Plan to start a request with what tiers have, after what the device has.

            |<- cached_prefix ->|<- hit ->|<- num_new_tokens ->|
            |   touched         |  read   |   to be computed   |

        Args:
            hit: what `find_prefix` answered for the same prefix.
            num_new_tokens: slots for tokens to be computed next; more can be allocated after the commit.
            options: for `allocate_slots`, such as `num_lookahead_tokens`.
        Returns:
            The plan; None if `allocate_slots` finds no room, with nothing changed.
        Raises:
            InvalidArgumentError: an empty hit, one for another request or prefix; a request that has blocks,
                or a plan. Nothing has changed.
            InvalidBlockError: the tiers have not all of it any more: ask again. Nothing has changed.
        """
        self._open_plans.recover()
        request_id = request.request_id
        num_device_tokens = 0 if cached_prefix is None else cached_prefix.num_tokens
        if request_id in self._open_plans.by_request:
            raise InvalidArgumentError(f"a plan is open for request {request_id!r}; close it first")
        if self.manager.holds_blocks(request_id):
            raise InvalidArgumentError(f"request {request_id!r} has blocks already; a prefix goes in front")
        if hit.num_tokens < 1 or hit[:2] != (request_id, num_device_tokens):
            raise InvalidArgumentError(
                f"the hit is of {hit.num_tokens} tokens after {hit.num_device_tokens} of request "
                f"{hit.request_id!r}; this is request {request_id!r} with {num_device_tokens} on the device"
            )
        end = num_device_tokens + hit.num_tokens
        rows = None
        if end <= len(request.block_hashes) * self.manager.block_pool.hash_block_size:
            rows = self._prefixes.find_blocks(request, num_device_tokens, end)
        if rows is None:
            raise InvalidBlockError(
                f"the tiers have not all of tokens {num_device_tokens} to {end} of request {request_id!r} "
                "(any more); call find_prefix() again"
            )
        allocate = partial(
            self.manager.allocate_slots,
            request,
            num_new_tokens,
            cached_prefix,
            num_external_computed_tokens=hit.num_tokens,
            delay_cache_blocks=True,
            **options,
        )
        plan = ReadBackPlan(
            request, hit, self.manager, self.tiered_cache, rows, allocate, self._open_plans, self._count
        )
        return plan if self._open_plans.open(plan) else None

    def note_started(self, cached_prefix: CachedPrefix) -> None:
        """Count a request that starts with what the device has, and nothing from tiers."""
        self._statistics.num_tokens_by_medium[MEDIUM_GPU] += cached_prefix.num_tokens

    # ---- reading ahead ---------------------------------------------------------------------------

    def prefetch(self, request: SchedulableRequest) -> int:
        """Let blocks of a request that waits be read from disk into host memory, by a thread.

        Returns:
            How many blocks are being read for it now; 0 where nothing is on disk alone, or so many are being
            read already.
        They are in host memory after some later `TieredCache.flush()`. What cannot be read is counted, and
        found out again by whoever needs it.
        """
        num_tokens = self.manager.get_computed_blocks(request).num_tokens
        found = self._prefixes.count_tokens(request, num_tokens, request.num_tokens - 1)
        rows = self._prefixes.find_blocks(request, num_tokens, num_tokens + found) if found else None
        keys = [key for row in rows or () for key in row.values()]
        return self.tiered_cache.prefetch(request.request_id, keys)

    def cancel_prefetch(self, request_id: str) -> None:
        """Nothing more is read ahead for this request; nothing happens if nothing is."""
        self.tiered_cache.cancel_prefetch(request_id)

    # ---- inside ----------------------------------------------------------------------------------

    def _count_by_medium(
        self, request: SchedulableRequest, start: int, end: int, by_medium: dict[str, int]
    ) -> None:
        """Add to the counts; tokens for which nothing is read count as of the warmest tier."""
        if len(self._media) == 1:
            by_medium[self._media[0]] += end - start
            return
        step = self.manager.alignment
        level_of = [0] * ((end - start) // step)
        rows = self._prefixes.find_blocks(request, start, end) or []
        for group, row in zip(self._groups, rows, strict=True):
            for position, key in row.items():
                level = self.tiered_cache.find_tier(key) or 0
                place = (position * group.block_size - start) // step
                level_of[place] = max(level_of[place], level)
        for level in level_of:
            by_medium[self._media[level]] += step

    def _count(self, plan: ReadBackPlan) -> None:
        """Count a plan that is being closed, once."""
        counts = self.get_statistics()
        if plan.outcome is PlanState.COMMITTED:
            counts.num_committed += 1
            counts.num_tokens_by_medium[MEDIUM_GPU] += plan.hit.num_device_tokens
            for medium, num_tokens in plan.hit.num_tokens_by_medium.items():
                counts.num_tokens_by_medium[medium] += num_tokens
        else:
            counts.num_aborted += 1
            counts.num_unreadable += plan.is_unreadable
        self._statistics = counts  # no call in between
        plan.is_counted = True
