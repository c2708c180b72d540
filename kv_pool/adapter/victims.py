"""`Victims`: chooses and evicts sequences when too few blocks are free, by an `EvictionPolicy`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_pool.adapter.holdings import Holder, Holdings
from kv_pool.core.block import KVCacheBlock
from kv_pool.ids import BlockId, SequenceId
from kv_pool.protocol import NO_SEQUENCE, Eviction


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence that may be evicted.

    Attributes:
        num_blocks: blocks that it holds, including shared ones.
        last_access_time: seconds of the pool's clock.
    """

    sequence_id: SequenceId
    num_blocks: int
    priority: int
    last_access_time: float


class EvictionPolicy(Protocol):
    """The order in which sequences are evicted.

    The candidates hold no pinned block, have no higher priority than the request that needs blocks, and are
    not the request's own sequence. The pool evicts as few whole sequences as suffice, and none if evicting
    all of them would not suffice.
    """

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[SequenceId]:
        """Return the ids of the sequences to evict, in order; a sequence that is left out is never evicted.

        `sequences` is ordered by last access, least recent first. Called while the pool is locked.
        """


@dataclass(frozen=True)
class LRUEviction:
    """Evicts lower priority first; within a priority, the least recently accessed first."""

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[SequenceId]:
        ranked = sorted(sequences, key=lambda sequence: (sequence.priority, sequence.last_access_time))
        return [sequence.sequence_id for sequence in ranked]


class Victims:
    """Chooses and evicts sequences.

    Args:
        policy: None for the LRU policy, used by `GPUKVPool.evict` only.
        on_evicted: called with a sequence's id and its block ids before it loses them. Without it
            `Holdings.evictions` keeps the eviction until the owner is notified.

    Attributes:
        has_policy: whether a policy was given.
        num_evicted: number of sequences evicted so far.
        together: sequences of the current batch; none of them is evicted for another.
    """

    def __init__(
        self,
        holdings: Holdings,
        policy: EvictionPolicy | None,
        on_evicted: Callable[[SequenceId, list[BlockId]], object] | None,
    ) -> None:
        self._holdings = holdings
        self.has_policy = policy is not None
        self._policy = LRUEviction() if policy is None else policy
        self._on_evicted = on_evicted
        self.num_evicted = 0
        self.together: frozenset[SequenceId] = frozenset()

    def rank(self, priority: int, sequence_id: SequenceId | None) -> Iterator[Holder]:
        """Yield the sequences that may be evicted for this one, in the policy's order. Change none meanwhile.

        Excludes sequences of higher priority, with a pinned block, or frozen by a migration.
        Cost: O(1) for each with the LRU policy; another policy ranks all of them first.
        """
        holdings = self._holdings
        if type(self._policy) is LRUEviction:
            for holder in holdings.order.iterate(priority):
                if (
                    holder.sequence_id != sequence_id
                    and holder.sequence_id not in self.together
                    and holder.sequence_id not in holdings.frozen
                ):
                    yield holder
            return
        candidates = [
            SequenceInfo(holder.sequence_id, len(holder.blocks), holder.priority, holder.last_access_time)
            for holder in holdings.holders.values()
            if holder.priority <= priority
            and holder.sequence_id != sequence_id
            and holder.sequence_id not in self.together
            and holder.sequence_id not in holdings.frozen
            and not holdings.pins.is_any_pinned(holder.blocks)
        ]
        allowed = {candidate.sequence_id for candidate in candidates}
        ranked = dict.fromkeys(self._policy.rank(candidates))
        for victim in ranked:
            if victim in allowed:
                yield holdings.holders[victim]

    def choose(
        self,
        priority: int,
        sequence_id: SequenceId | None,
        num_blocks: int,
        has_run: Callable[[list[BlockId]], bool] | None = None,
    ) -> list[Holder] | None:
        """Return the first sequences in the policy's order that free `num_blocks`; None if all do not.

        Args:
            has_run: called with the ids that would become free; evict more sequences while it returns False.
        """
        victims: list[Holder] = []
        freed_ids: list[BlockId] = []
        left: dict[KVCacheBlock, int] = {}
        if num_blocks <= 0 and has_run is None:
            return victims
        for holder in self.rank(priority, sequence_id):
            victims.append(holder)
            for position, block in enumerate(holder.blocks):
                left[block] = left.get(block, block.ref_cnt) - 1
                if left[block] == 0 and not self._holdings.will_pin(holder, position, block):
                    freed_ids.append(block.block_id)
            if len(freed_ids) >= num_blocks and (has_run is None or has_run(freed_ids)):
                return victims
        return None

    def evict(self, victims: Sequence[Holder], for_sequence_id: SequenceId = NO_SEQUENCE) -> list[SequenceId]:
        """Evict these sequences, one after the other.

        Args:
            for_sequence_id: the sequence that needs blocks; NO_SEQUENCE: the caller notifies the owners.
        Returns:
            The ids of the evicted sequences.
        """
        for holder in victims:
            block_ids = [block.block_id for block in holder.blocks]
            if self._on_evicted is not None:
                self._on_evicted(holder.sequence_id, block_ids)
            blocks = list(holder.blocks)
            self._holdings.evictions.note(
                Eviction(holder.sequence_id, tuple(block_ids), for_sequence_id),
                is_notified=self._on_evicted is not None or for_sequence_id == NO_SEQUENCE,
            )
            self._holdings.drop(blocks, {holder: blocks})
            self.num_evicted += 1
        return [holder.sequence_id for holder in victims]
