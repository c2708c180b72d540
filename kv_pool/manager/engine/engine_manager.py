"""`EngineManager`: a `KVCacheManager` behind the interface that vLLM's scheduler calls.

`KVCacheBlocks`: blocks of one request, by group, as the scheduler receives and passes them.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import refuse_interrupted
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockId, BlockMove, GroupId, RequestId
from kv_pool.manager.admission import count_full_sequence, count_surplus, plan_step
from kv_pool.manager.allocating import allocate_step, cache_written, free_skipped_blocks
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import BlockTable, Step
from kv_pool.manager.invalid_blocks import evict_invalid_blocks
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.prefix_caching import PrefixCaching, list_hashes


@mypyc_attr(allow_interpreted_subclasses=False)
class KVCacheBlocks:
    """The blocks of a look-up, of an allocation, or of a whole request.

    Attributes:
        blocks: one sequence per group, head first; they may be live block tables, so do not change them.

    Contract: vLLM 0.33 `KVCacheBlocks`.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, blocks: Any) -> None:
        self.blocks: Any = blocks  # a tuple; Any, because callers also pass lists

    def __repr__(self) -> str:
        return f"KVCacheBlocks(blocks={self.blocks!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheBlocks):
            return NotImplemented
        return cast(bool, self.blocks == other.blocks)

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """Append the blocks of `other` to those of this object, group by group, in new lists."""
        return KVCacheBlocks(
            tuple([[*mine, *more] for mine, more in zip(self.blocks, other.blocks, strict=False)])
        )

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[GroupId] | None = None
    ) -> tuple[list[BlockId], ...] | None:
        """Return the ids of the blocks, one list per group.

        Args:
            allow_none: return None if all groups are empty.
            group_ids: the groups to return; default: all.
        """
        groups: Any = self.blocks
        if group_ids is not None:
            groups = [groups[group_id] for group_id in group_ids]
        if allow_none and all(len(group) == 0 for group in groups):
            return None
        return tuple([list_ids(group) for group in groups])

    def get_unhashed_block_ids(self) -> list[BlockId]:
        """Return the ids of the blocks without a hash; for a single group."""
        (group,) = self.blocks
        return [block.block_id for block in group if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[BlockId]]:
        """Return the ids of the blocks without a hash by group, without null blocks."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> "KVCacheBlocks":
        """Return an object with as many groups and no blocks."""
        return KVCacheBlocks(tuple([() for _ in self.blocks]))


def list_ids(blocks: Any) -> list[BlockId]:
    """Return the ids of the blocks of one group."""
    if isinstance(blocks, list):
        ids: list[BlockId] = []
        for block in blocks:
            if isinstance(block, KVCacheBlock):
                ids.append(block.block_id)
            else:
                ids.append(block.block_id)  # an engine's tests pass objects of their own
        return ids
    return [block.block_id for block in blocks]


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineManager:
    """The calls of vLLM's scheduler and connectors, answered by a `KVCacheManager`.

    Args:
        manager: the tables, groups and pool, with `PrefixRules`; further methods, such as those for
            retention, are called on it.
        event_labels: for each group, the kind of attention and the window that events state.
        waiting_statuses: values of `request.status` to which the watermark applies.
        zeroed_groups: groups whose new blocks are listed for the worker to overwrite with zeros.
        copy_type: makes a copy's description for the worker from the ids of its source and its target.

    Attributes:
        request_options: applies the options of clients to their requests; None until `set_request_options`.
        caching, groups: what the manager looks up and caches, and its groups.
        zeroed_groups: the groups whose new blocks are listed for the worker.
        empty_kv_cache_blocks: the result for no blocks; one object, so that a decode step creates none.

    Requests have the attributes that vLLM's have: `request_id`, `num_tokens`, `num_prompt_tokens`,
    `num_computed_tokens`, `num_in_flight_tokens`, `block_hashes`, `shared_prefix_boundary`, `status`,
    `skip_reading_prefix_cache`, `sampling_params`.

    Unlike those of `KVCacheManager`, the calls follow vLLM in what they tolerate: an unknown request has no
    blocks, and freeing it does nothing.
    Contract: vLLM 0.33 `KVCacheManager`.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        event_labels: Sequence[tuple[str, int | None]],
        waiting_statuses: Sequence[Any] = (),
        zeroed_groups: Sequence[GroupId] = (),
        copy_type: Callable[[BlockId, BlockId], Any] = BlockMove,
    ) -> None:
        if manager.prefix_rules is None:
            raise InvalidArgumentError("an EngineManager needs a manager with prefix_rules")
        self.manager: KVCacheManager = manager
        self.caching: PrefixCaching = manager.caching
        self.groups: list[BlockGroup] = manager._groups
        self.block_pool: BlockPoolCore = manager.block_pool
        self.num_kv_cache_groups: int = len(manager.groups)
        self.max_model_len: int = manager.max_model_len
        self.watermark_blocks: int = manager.watermark_blocks
        self.enable_caching: bool = manager.block_pool.enable_caching
        manager.event_labels = list(event_labels)
        self.kv_cache_event_metadata: tuple[tuple[str, int | None], ...] = tuple(event_labels)
        self.empty_kv_cache_blocks: KVCacheBlocks = KVCacheBlocks(manager._no_blocks)
        self._waiting_statuses: tuple[Any, ...] = tuple(waiting_statuses)
        self.zeroed_groups: list[GroupId] = list(zeroed_groups)
        self._zeroed_ids: dict[GroupId, list[BlockId]] = {group_id: [] for group_id in zeroed_groups}
        self.caching.offers_states = self.caching.has_states
        self.caching.allows_missing_hashes = True
        manager.discounts_states = True
        self._copy_type: Callable[[BlockId, BlockId], Any] = copy_type
        self.request_options: Any = None
        self._with_options: dict[Any, Any] = {}

    def set_request_options(self, options: Any) -> None:
        """Call `note_request` of `options`; for requests in its `by_request` `note_leaving`, `note_left`.

        A request without `sampling_params.extra_args` costs two attribute lookups more, and its free one.
        """
        self.request_options = options
        self._with_options = options.by_request

    # ---- looking ---------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that are in use, 0 to 1."""
        return self.manager.usage

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Return True if the request may read the prefix cache."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Apply the request's options, and find the longest cached prefix that all groups have.

        Returns:
            The blocks, the number of their tokens, and the end of a longer prefix that only some groups have,
            0 for none: a state at that end would serve later requests.
        """
        if self.request_options is not None:
            params: Any = request.sampling_params
            if params is not None and params.extra_args is not None:
                self.request_options.note_request(request)
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        limit: int = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        blocks, num_tokens, junction = self.caching.find_prefix(request, limit)
        if num_tokens == 0:
            return self.empty_kv_cache_blocks, 0, junction
        if self.block_pool.enable_kv_cache_events:
            mode: Any = getattr(request, "kv_cache_report_mode", "incremental")
            if mode == "full":
                for group in self.groups:
                    num_found = len(blocks[group.group_id])
                    if num_found:
                        self.block_pool.emit_cached_block_events(
                            request, num_found, group.block_size, group.group_id
                        )
        return self.create_kv_cache_blocks(tuple(blocks)), num_tokens, junction

    def get_computed_blocks_for_connector(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """Find the prefix of a request whose states a connector may load, as `get_computed_blocks`.

        With full attention and states, the prefix is that of full attention; the last value is True if a
        group has a shorter one.
        """
        full = self.caching.lookup.full
        if full is not None and self.caching.has_states and self.prefix_cache_lookup_enabled(request):
            limit: int = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
            found, lengths = self.caching.lookup.find_by_group(list_hashes(request), limit)
            num_full = lengths[full.group_ids[0]]
            if max(lengths) == num_full:
                return self.create_kv_cache_blocks(tuple(found)), num_full, 0, min(lengths) < num_full
        blocks, num_tokens, junction = self.get_computed_blocks(request, max_cache_hit_length)
        return blocks, num_tokens, junction, False

    def find_tables(self, request_id: RequestId) -> list[BlockTable] | None:
        """Return the live block tables of the request, one per group; None for an unknown one."""
        return self.manager._tables.get(request_id)

    def get_blocks(self, request_id: RequestId) -> KVCacheBlocks:
        """Return the live block tables of the request; no blocks for an unknown one."""
        tables = self.manager._tables.get(request_id)
        if tables is None:
            return self.empty_kv_cache_blocks
        return self.create_kv_cache_blocks(tuple([table.blocks for table in tables]))

    def get_block_ids(self, request_id: RequestId) -> tuple[list[BlockId], ...]:
        """Return the block ids of the request by group; empty lists for an unknown one."""
        tables = self.manager._tables.get(request_id)
        if tables is None:
            return tuple([[] for _ in self.groups])
        return tuple([table.list_ids() for table in tables])

    def get_block_ids_for_computed_tokens(
        self, request_id: RequestId, num_computed_tokens: int
    ) -> tuple[list[BlockId], ...]:
        """Return the block ids as `get_block_ids`; of attention groups only those of the computed tokens."""
        clipped: list[list[BlockId]] = []
        for ids, group in zip(self.get_block_ids(request_id), self.groups, strict=True):
            if group.is_cacheable and not group.is_state:
                del ids[-(-num_computed_tokens // group.block_size) :]
            clipped.append(ids)
        return tuple(clipped)

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return the number of leading tokens of the request that are cached in every group."""
        request_id: RequestId = request.request_id
        tables = self.manager._tables.get(request_id)
        if tables is None:
            return 0
        lengths: list[int] = []
        for group in self.groups:
            if group.is_cacheable:
                lengths.append(0)
                for block in tables[group.group_id].blocks:
                    lengths[-1] = max(lengths[-1], int(block.num_key_tokens))
        return min(lengths, default=0)

    def create_kv_cache_blocks(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> KVCacheBlocks:
        """Return an object with these blocks; the shared one if there are none."""
        for group in blocks:
            if len(group) > 0:
                return KVCacheBlocks(blocks)
        return self.empty_kv_cache_blocks

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        """Return the first `num_computed_tokens` tokens of a look-up; a multiple of every block size."""
        clipped: list[list[KVCacheBlock]] = []
        for group, found in zip(self.groups, blocks.blocks, strict=True):
            num_blocks = num_computed_tokens // group.block_size
            if group.is_cacheable and (
                num_computed_tokens % group.block_size or (num_blocks > len(found) and not group.is_state)
            ):
                raise InvalidArgumentError(
                    f"cannot cut a prefix of {len(found)} blocks of {group.block_size} tokens to "
                    f"{num_computed_tokens} tokens"
                )
            clipped.append(list(found[:num_blocks]) if group.is_cacheable else [])
        return self.create_kv_cache_blocks(tuple(clipped))

    def get_num_common_prefix_blocks(self, running_request_id: RequestId) -> list[int]:
        """Return 0 for each group: vLLM 0.33 does not use common prefixes of running requests."""
        return [0] * self.num_kv_cache_groups

    # ---- taking ----------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: Sequence[GroupId] = (),
    ) -> KVCacheBlocks | None:
        """Make room for the next `num_new_tokens` tokens of the request; see vLLM's method.

        Returns:
            The blocks for the new tokens; None if they do not fit. Then nothing has changed, except that
            blocks which left the window are released.
        """
        if self.block_pool.is_changing:
            refuse_interrupted()
        manager = self.manager
        request_id: RequestId = request.request_id
        tables = manager._tables.get(request_id)
        if num_new_tokens == 0 and num_new_computed_tokens == 0 and num_external_computed_tokens == 0:
            raise InvalidArgumentError(
                f"request {request_id!r} has neither new tokens nor computed tokens to adopt; "
                "num_new_tokens must be greater than 0"
            )
        step = Step(
            request_id,
            tables,
            request.num_computed_tokens,
            num_new_computed_tokens,
            num_external_computed_tokens,
            num_new_tokens,
            num_lookahead_tokens,
            manager.max_model_len,
        )
        if tables is None:
            step.prefix_blocks = (
                manager._no_blocks if new_computed_blocks is None else new_computed_blocks.blocks
            )
            step.junction = request.shared_prefix_boundary
        if manager._forgets:
            num_in_flight: int = request.num_in_flight_tokens
            step.num_final = max(0, step.num_before - num_in_flight)
        if self.watermark_blocks and has_scheduled_reqs and request.status in self._waiting_statuses:
            step.num_left = self.watermark_blocks
        step.num_reserved = reserved_blocks
        step.num_encoder_tokens = num_encoder_tokens
        if full_sequence_must_fit:
            step.num_sequence = request.num_tokens
        step.prefill_end = self.caching.find_prefill_end(request)
        step.caches = not delay_cache_blocks
        added = allocate_step(manager, request, step)
        if added is None:
            return None
        if added is manager._no_blocks:
            return self.empty_kv_cache_blocks
        if self.zeroed_groups:
            self._note_zeroed(step, added, skip_zeroing_group_ids)
        return self.create_kv_cache_blocks(added)

    def count_needed_blocks(
        self,
        request_id: RequestId,
        num_tokens: int,
        new_computed_blocks: Any,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Return the number of free blocks that slots for the first `num_tokens` tokens take.

        Args:
            new_computed_blocks: the hits of each group, for a request without blocks.
            total_computed_tokens: tokens that are computed before the step, external ones included.
            num_local_computed_tokens: those of them in the table or in the hits.
            num_tokens_main_model: `num_tokens` without the slots for speculative tokens.
            apply_admission_cap: count the most blocks that a group holds at a time, for a whole sequence.
            prefill_end: tokens that the step must reach to save a state on its way.

        Contract: vLLM 0.33 `KVCacheCoordinator.get_num_blocks_to_allocate`.
        """
        tables = self.manager._tables.get(request_id)
        num_lookahead = max(0, num_tokens - num_tokens_main_model)
        step = Step(
            request_id,
            tables,
            0,
            num_local_computed_tokens,
            total_computed_tokens - num_local_computed_tokens,
            num_tokens_main_model - total_computed_tokens,
            num_lookahead,
            0,
        )
        if tables is None:
            step.prefix_blocks = new_computed_blocks
        step.num_encoder_tokens = num_encoder_tokens
        if self.caching.interval == 0:
            step.prefill_end = prefill_end
        if apply_admission_cap:
            need = count_full_sequence(self.manager, step, num_tokens_main_model, num_lookahead=num_lookahead)
        else:
            need = plan_step(self.manager, step)
        return need - count_surplus(self.manager, tables, num_tokens_main_model)

    def new_step_starts(self) -> None:
        """Start a step: what was allocated before is written before what follows is read."""
        self.manager.begin_step()

    def take_new_block_ids(self) -> list[BlockId]:
        """Return the ids of new blocks to overwrite with zeros, by group, since the last call."""
        taken: list[BlockId] = []
        for group_id in self.zeroed_groups:
            taken += self._zeroed_ids[group_id]
            self._zeroed_ids[group_id] = []
        return taken

    def record_blocks_for_zeroing(self, request_id: RequestId, start_token: int) -> None:
        """List the request's blocks from `start_token` on, a block's start, for zeroing."""
        tables = self.manager._tables[request_id]
        for group_id in self.zeroed_groups:
            first = start_token // self.groups[group_id].block_size
            self._zeroed_ids[group_id] += [block.block_id for block in tables[group_id].blocks[first:]]

    def _note_zeroed(
        self, step: Step, added: tuple[Sequence[KVCacheBlock], ...], without_external: Sequence[GroupId]
    ) -> None:
        """List the blocks that a step added for zeroing.

        Args:
            without_external: groups whose external tokens arrive in their blocks: only the blocks after these
                are listed.
        """
        tables = self.manager._tables[step.request_id]
        for group_id in self.zeroed_groups:
            ids = self._zeroed_ids[group_id]
            plan = step.plans[group_id]
            if plan.num_external and group_id not in without_external:
                first = max(plan.num_nulls, len(step.prefix_blocks[group_id]))
                for block in tables[group_id].blocks[first : first + plan.num_external]:
                    ids.append(block.block_id)
            for block in added[group_id]:
                ids.append(block.block_id)

    # ---- caching ---------------------------------------------------------------------------------

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Cache the full blocks of the first `num_computed_tokens` tokens, as far as they have hashes."""
        request_id: RequestId = request.request_id
        tables = self.manager._tables.get(request_id)
        if tables is not None and self.enable_caching:
            self.block_pool.holds.check_whole()
            cache_written(self.manager, request, tables, num_computed_tokens)

    def evict_blocks(self, block_ids: Any) -> None:
        """Evict these blocks, and no others, from the prefix cache and the lower tiers. References stay.

        vLLM's scheduler lists the blocks that its running requests have computed from bad ones.
        """
        self.block_pool.holds.check_whole()
        listed = list(block_ids)
        evict_invalid_blocks(self.block_pool, listed)
        retention = self.manager.retention
        if retention is not None and retention.is_active:
            retention.forget_blocks([self.block_pool.blocks[block_id] for block_id in listed])

    def reset_prefix_cache(self) -> bool:
        """Evict every prefix. Return False, with nothing changed, while any request holds blocks."""
        return self.manager.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """Return the pool's events since the last call; stores state their group's kind of attention."""
        return self.manager.take_events()

    # ---- releasing -------------------------------------------------------------------------------

    def free(self, request: Any) -> None:
        """Release all blocks of the request, tail first. Nothing happens if it has none."""
        request_id: RequestId = request.request_id
        tables = self.manager._tables.get(request_id)
        has_options = len(self._with_options) > 0 and request_id in self._with_options
        if has_options:
            self.request_options.note_leaving(request)
        if tables is not None:
            self.manager.free(request)
        if has_options:
            self.request_options.note_left(request)

    def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
        """Forget the request and return its blocks, head first by group, for the caller to free.

        The directives of its options apply to them.
        """
        self.block_pool.holds.check_whole()
        request_id: RequestId = request.request_id
        has_options = request_id in self._with_options
        if has_options:
            self.request_options.note_leaving(request)
        popped: list[KVCacheBlock] = []
        tables = self.manager._tables.get(request_id)
        if tables is not None:
            for group_id, table in enumerate(tables):
                first = table.num_null_blocks
                leaving = table.blocks[first:]
                for listener in self.manager.listeners:
                    listener.note_leaving(request_id, GroupId(group_id), first, leaving)
                popped += leaving
            for listener in self.manager.listeners:
                listener.note_ended(request_id, tables)
            self.manager.pop_tables(request_id)
            self.manager.forget_tables(request_id)
        if has_options:
            self.request_options.note_left(request)
        return popped

    def remove_skipped_blocks(
        self,
        request_id: RequestId,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Release the blocks that no token after the processed ones attends to."""
        tables = self.manager._tables.get(request_id)
        if tables is not None and self.manager._forgets:
            if self.block_pool.is_changing:
                refuse_interrupted()
            free_skipped_blocks(self.manager, request_id, tables, processed_computed_tokens)

    # ---- hand-overs to workers and connectors ----------------------------------------------------

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[KVCacheBlock]]:
        """Return the copies to make before the step writes, and the blocks to free once they are made."""
        if not len(self.manager.copies):
            return [], []
        moves, retained = self.manager.take_block_copies_with_blocks()
        return [self._copy_type(move.source, move.target) for move in moves], retained

    def take_boundary_state_offloads(self) -> dict[RequestId, list[tuple[int, BlockId, int]]]:
        """Return the states at boundaries since the last call: request -> (group, block, tokens)."""
        taken: dict[RequestId, list[tuple[int, BlockId, int]]] = {}
        caching = self.caching
        if caching.state_offers:
            offers = sorted(caching.state_offers, key=lambda offer: offer[1])
            caching.state_offers = []
            for request_id, group_id, block, num_tokens in offers:
                taken.setdefault(request_id, []).append((group_id, block.block_id, num_tokens))
        return taken

    def finalize_partial_tail_offloads(self, request: Any) -> list[tuple[int, BlockId, int]]:
        """Return the states within a block that a finished request leaves: (group, block, tokens).

        Only those that no later token has overwritten. A second call returns [].
        """
        request_id: RequestId = request.request_id
        tables: list[BlockTable] = self.manager._tables.get(request_id, [])
        finished: list[tuple[int, BlockId, int]] = []
        for group, table in zip(self.groups, tables, strict=False):
            num_tokens = table.tail_tokens
            table.tail_tokens = 0
            if num_tokens and not request.num_in_flight_tokens and request.num_computed_tokens == num_tokens:
                block = table.blocks[-(-num_tokens // group.block_size) - 1]
                finished.append((group.group_id, block.block_id, num_tokens))
        return finished
