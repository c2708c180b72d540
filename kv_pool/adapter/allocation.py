"""`Allocation`: takes the blocks of a request by the first rung of a ladder that has some."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, cast, get_args

from kv_pool.contiguous import compaction, plan
from kv_pool.contiguous.compaction import CopyBlocks, Relocation
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core.arguments import as_count, as_int, check_type
from kv_pool.core.block import KVCacheBlock, list_ids
from kv_pool.core.freeing import free_listed
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.core.pool_state import check_whole
from kv_pool.core.taking import take, take_listed
from kv_pool.errors import InvalidArgumentError, PinLimitError, PoolExhaustedError, UnknownDeviceError
from kv_pool.ids import BlockId, SequenceId
from kv_pool.manager.sequences.holdings import Holder, Holdings, as_new_id, import_retention
from kv_pool.manager.sequences.ranked_order import EvictionPolicy, LRUEviction, RankedOrder
from kv_pool.protocol import NO_SEQUENCE, NORMAL, URGENT, BlockAllocationRequest, Contiguity, Eviction

_CONTIGUITIES = get_args(Contiguity)


class Allocation:
    """Allocates the blocks of one request at a time. Use it only with the pool's lock held.

        rung           finds                                               by
        free run       the ids after the sequence if empty, else a run     FreeRunIndex.find
        cleared run    a run that other blocks are moved out of            compaction.clear_run
        retained run   like these, with cached blocks of high priority     the same
        any blocks     the cheapest blocks                                 core.taking.take

    If a run is required: all but any blocks. If one is preferred: all but the retained run. Otherwise: any
    blocks. If no rung has blocks, the fewest sequences are evicted that leave a rung with blocks, and the
    rungs are tried again. PoolExhaustedError lists what was tried. `GPUKVPool` calls the migration hook,
    without the lock, and then repeats the request.

    The rungs take nothing: they only find free blocks, and `append` takes them. So it alone sets
    `pool.is_changing` when it takes them, and clears it when they belong to the sequence. What moves blocks
    or evicts a sequence before that is a change of its own, and callbacks run between the changes.

    Args:
        policy: which sequences are evicted first; None: none is evicted for a request.
        on_evicted: called with a sequence's id and its block ids before it loses them. Without it
            `Holdings.evictions` keeps the eviction until the owner is notified.
        reserved_blocks: free blocks that requests of priority 0 cannot take.
        copy: copies the bytes of blocks; raises if that fails.
        on_moved: called with each relocation before any of its old ids can be taken; None: move no blocks.

    Attributes:
        num_evicted: number of sequences evicted so far.
    """

    def __init__(
        self,
        block_pool: RunBlockPool,
        holdings: Holdings,
        policy: EvictionPolicy | None,
        on_evicted: Callable[[SequenceId, list[BlockId]], object] | None,
        reserved_blocks: int,
        copy: CopyBlocks,
        on_moved: Callable[[Relocation], object] | None,
    ) -> None:
        self._run_pool = block_pool
        self._pool: BlockPoolCore = block_pool  # the same, compiled
        self._index = block_pool.run_index
        self._holdings = holdings
        self._has_policy = policy is not None
        if policy is not None and type(policy) is not LRUEviction:
            holdings.order = RankedOrder(holdings, policy)
        self._on_evicted = on_evicted
        self.num_evicted = 0
        self.reserved_blocks = reserved_blocks
        self._copy = copy
        self._on_moved = on_moved

    def append(
        self,
        request: BlockAllocationRequest,
        together: Collection[SequenceId] = (),
        tried: Sequence[str] = (),
    ) -> list[KVCacheBlock]:
        """Take the blocks of a checked request, and append them to its sequence. See `GPUKVPool.allocate`.

        Args:
            together: sequences of the same batch; none of them is evicted for another.
            tried: what the caller has already tried, for the error message.
        """
        pool, holdings, sequence_id = self._pool, self._holdings, request.sequence_id
        if holdings.frozen:
            holdings.check_usable(sequence_id)
        device_id = request.device_id
        if device_id is not None and device_id != holdings.device_id:
            raise UnknownDeviceError(
                f"this pool is on device {holdings.device_id}; ask the pool of device {device_id!r}, or "
                "migrate"
            )
        if request.pinned:
            holdings.pins.check_room(request.num_blocks)
        check_whole(pool)
        sequence, after = holdings.holders.get(sequence_id), None
        if sequence is not None:
            after = next(reversed(sequence.blocks))  # a hint, even if a callback frees it
        elif holdings.evictions:
            holdings.evictions.check(sequence_id)
        if holdings.retention is not None:
            holdings.retention.expire()
        reasons = list(tried)
        found = self._find(request, after, reasons)
        if found is None and self._evict_for(request, together, reasons):
            found = self._find(request, after, reasons)
        if found is None:
            self._refuse(request, reasons)
        check_whole(pool)  # `on_moved` may have caught an interrupt of its own call
        pool.is_changing = True
        if found:
            take_listed(pool, found)
        else:
            found = take(pool, request.num_blocks, after)
        if request.pinned:
            try:
                holdings.pins.pin(found)
            except PinLimitError:  # a callback has pinned others
                free_listed(pool, found)
                pool.is_changing = False
                raise
        sequence = holdings.holders.get(sequence_id)  # `on_evicted` may have started or freed it
        if sequence is None:
            holdings.evictions.forget(sequence_id)
            sequence = Holder(sequence_id, request.priority, holdings.clock())
        else:
            sequence.priority = max(sequence.priority, request.priority)
        holdings.hold(sequence, found)
        pool.is_changing = False
        return found

    # ---- rungs of free blocks ----------------------------------------------------------------------

    def _find(
        self, request: BlockAllocationRequest, after: KVCacheBlock | None, reasons: list[str]
    ) -> list[KVCacheBlock] | None:
        """Find the blocks of the first rung that has some.

        Args:
            after: the last block of the request's sequence; ids directly after it are preferred.
            reasons: receives why a rung has none, for the error message.
        Returns:
            A run of free blocks; [] if any free blocks will do; None if too few are free, or no rung has a
            run that is required.
        Raises:
            CopyFailedError: no block has moved.
        """
        if request.num_blocks > self.count_available(request.priority):
            return None
        is_required = request.contiguous == "require"
        if request.num_blocks == 1 or request.contiguous == "no":
            return []
        if not is_required and self._pool.free_index is None:
            return []  # a run would take other blocks than the cache policy chooses
        run = self._find_run(request, after, True, reasons)
        if run is None and is_required and self._index.has_retained():
            run = self._find_run(request, after, False, reasons)
        return [] if run is None and not is_required else run

    def count_available(self, priority: int) -> int:
        """Return how many blocks a request of this priority can take; negative if the reserve is in use."""
        num_free = self._pool.free_block_queue.num_free_blocks
        return num_free if priority != NORMAL else num_free - self.reserved_blocks

    def _find_run(
        self,
        request: BlockAllocationRequest,
        after: KVCacheBlock | None,
        avoids_retained: bool,
        reasons: list[str],
    ) -> list[KVCacheBlock] | None:
        """Find a free run, or move blocks out of one, unless that exceeds `max_moves` of the request.

        Args:
            avoids_retained: find no run with cached blocks of high priority.
        """
        num_blocks = request.num_blocks
        run = self._index.find(
            self._pool, num_blocks, after, avoids_retained=avoids_retained, lowest_empty=avoids_retained
        )
        if run is not None:
            return run
        if self._on_moved is None:
            reasons.append("no compaction (ids change in a call of allocate only with on_moved=)")
            return None
        run = compaction.clear_run(
            self._run_pool,
            num_blocks,
            self._copy,
            self._on_moved,
            avoids_retained=avoids_retained,
            max_moves=request.max_moves,
        )
        if run is None:
            reasons.append("compaction")
        return run

    # ---- eviction ----------------------------------------------------------------------------------

    def _evict_for(
        self, request: BlockAllocationRequest, together: Collection[SequenceId], reasons: list[str]
    ) -> bool:
        """Evict the fewest sequences that leave enough blocks, and if a run is required, one that is free or
        can be cleared.

        Returns:
            Whether enough blocks are free then. No sequence is evicted if all do not suffice.
        """
        num_blocks = request.num_blocks
        if num_blocks >= len(self._pool.blocks):
            return False
        if not self._has_policy:
            reasons.append("no eviction (eviction_policy is None)")
            return False
        make_run_check = None
        why = "too few blocks may be evicted"
        if request.contiguous == "require" and num_blocks > 1:
            max_moves = 0 if self._on_moved is None else request.max_moves
            make_run_check = partial(plan.make_run_check, self._run_pool, num_blocks, max_moves)
            why = "no run even if all candidates are evicted"
        num_missing = num_blocks - self.count_available(request.priority)
        spared = {request.sequence_id, *together}
        victims = self._holdings.choose_victims(request.priority, spared, num_missing, make_run_check)
        if victims is not None:
            self.evict(victims, request.sequence_id)
            if num_blocks <= self.count_available(request.priority):
                return True  # else `on_evicted` has taken blocks
        reasons.append(f"eviction ({why})")
        return False

    def evict(self, victims: Sequence[Holder], for_sequence_id: SequenceId = NO_SEQUENCE) -> list[SequenceId]:
        """Evict these sequences, one after the other; skip those that `on_evicted` has freed or pinned.

        Args:
            for_sequence_id: the sequence that needs blocks; NO_SEQUENCE: the caller notifies the owners.
        Returns:
            The ids of the evicted sequences.
        """
        pool, holdings = self._pool, self._holdings
        holders = holdings.holders
        evicted: list[SequenceId] = []
        for holder in victims:
            block_ids = [block.block_id for block in holder.blocks]
            if self._on_evicted is not None and holders.get(holder.sequence_id) is holder:
                self._on_evicted(holder.sequence_id, block_ids)
            check_whole(pool)  # it, or the policy, may have caught an interrupt of its own call
            if holders.get(holder.sequence_id) is not holder or holdings.pins.is_any_pinned(holder.blocks):
                continue
            blocks = list(holder.blocks)
            pool.is_changing = True
            holdings.evictions.note(
                Eviction(holder.sequence_id, tuple(block_ids), for_sequence_id),
                is_notified=self._on_evicted is not None or for_sequence_id == NO_SEQUENCE,
            )
            holdings.drop(blocks, {holder: blocks})
            self.num_evicted += 1
            evicted.append(holder.sequence_id)
            pool.is_changing = False
        return evicted

    # ---- refusal -----------------------------------------------------------------------------------

    def _refuse(self, request: BlockAllocationRequest, reasons: Sequence[str]) -> NoReturn:
        num_free = self.count_available(URGENT)
        num_reserved = num_free - self.count_available(NORMAL)
        kept = f", {num_reserved} of them reserved" if num_reserved and request.priority == NORMAL else ""
        run = "a run of " if request.contiguous == "require" else ""
        tried = ", ".join(dict.fromkeys(filter(None, reasons))) or "nothing else"
        raise PoolExhaustedError(
            f"asked for {run}{request.num_blocks} blocks for sequence {request.sequence_id}, {num_free} are "
            f"free of {len(self._pool.blocks) - 1}{kept}. Tried: {tried}. "
            f"Free or evict a sequence, or ask for fewer."
        )

    # ---- batches -----------------------------------------------------------------------------------

    def append_all(
        self,
        requests: Sequence[BlockAllocationRequest],
        done: list[list[KVCacheBlock]],
        tried: Sequence[str] = (),
    ) -> list[list[BlockId]]:
        """Allocate the blocks of all requests, or of none.

        Args:
            done: empty; receives the blocks of each served request, even if a later request fails.
            tried: as in `append`.
        """
        together = {request.sequence_id for request in requests}
        holdings = self._holdings
        priorities = {one: holdings.holders[one].priority for one in together if one in holdings.holders}
        try:
            for request in requests:
                done.append(self.append(request, together, tried))
        except Exception:
            for request, blocks in reversed(list(zip(requests, done, strict=False))):
                check_whole(self._pool)
                holder = holdings.holders.get(request.sequence_id)
                if holder is None or holder.blocks.keys().isdisjoint(blocks):
                    continue  # freed by `on_evicted`
                if request.pinned:
                    holdings.pins.unpin(blocks, None, holdings.holders_of)
                holdings.drop(blocks, {holder: blocks})
            for sequence_id, priority in priorities.items():
                holder = holdings.holders.get(sequence_id)
                if holder is not None and holder.priority != priority:
                    holder.priority = priority
                    holdings.order.note_access(holder)
            raise
        # Read the ids last: a later request may have moved the blocks of an earlier one.
        return [list_ids(blocks) for blocks in done]


def as_priority(priority: Any) -> int:
    """Return the priority of a request as an int. Raise InvalidArgumentError unless it is 0, 1 or 2."""
    number = as_int("priority", priority)
    if not NORMAL <= number <= URGENT:
        raise InvalidArgumentError(f"priority is {number}; it is 0 (normal), 1 (high) or 2 (urgent)")
    return number


def as_request(request: Any) -> BlockAllocationRequest:
    """Return the request with ids and counts as ints. Raise for a request that no pool can serve.

    Call it without the pool's lock: the first request with a priority imports the retention.
    """
    check_type("request", request, BlockAllocationRequest)
    num_blocks, sequence_id, priority = request.num_blocks, request.sequence_id, request.priority
    pinned, contiguous = request.pinned, request.contiguous
    device_id, max_moves = request.device_id, request.max_moves
    if as_int("num_blocks", num_blocks) < 1:
        raise InvalidArgumentError(f"num_blocks is {num_blocks}; ask for at least 1 block")
    new_id = as_new_id("sequence_id", sequence_id)
    level = as_priority(priority)
    if level != NORMAL:
        import_retention()
    if not isinstance(contiguous, str) or contiguous not in _CONTIGUITIES:
        raise InvalidArgumentError(f"contiguous is {contiguous!r}; it is require, prefer or no")
    device = None if device_id is None else as_int("device_id", device_id)
    limit = None if max_moves is None else as_count("max_moves", max_moves)
    if (
        type(num_blocks) is int
        and type(sequence_id) is int
        and type(priority) is int
        and type(pinned) is bool
        and (device is None or type(device_id) is int)
        and (limit is None or type(max_moves) is int)
    ):
        checked: BlockAllocationRequest = request
        return checked
    return replace(
        cast(BlockAllocationRequest, request),
        num_blocks=as_int("num_blocks", num_blocks),
        sequence_id=new_id,
        priority=level,
        pinned=bool(pinned),
        device_id=device,
        max_moves=limit,
    )
