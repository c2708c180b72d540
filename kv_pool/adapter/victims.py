"""`Victims`: the sequences that lose their blocks when too few are free, by an `EvictionPolicy`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_pool.adapter.holdings import Holder, Holdings
from kv_pool.core.block import KVCacheBlock
from kv_pool.protocol import NO_SEQUENCE, Eviction


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A sequence that may lose its blocks.

    Attributes:
        num_blocks: held by it, shared ones included.
        last_access_time: seconds of the pool's clock.
    """

    sequence_id: int
    num_blocks: int
    priority: int
    last_access_time: float


class EvictionPolicy(Protocol):
    """Decides which sequence is evicted first.

    It is asked with sequences only that hold no pinned block, have no higher priority than the request that
    needs room, and are not the request's own. The pool evicts as few of them as make room, whole sequences,
    and none at all where even all of them would not.
    """

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[int]:
        """Ids of sequences that may go, the first to go first; those left out are safe.

        `sequences` comes in the order of last access, longest ago first. Called while the pool is locked.
        """


@dataclass(frozen=True)
class LRUEviction:
    """Lower priority goes first; of equal ones what was not accessed for the longest time."""

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[int]:
        ranked = sorted(sequences, key=lambda sequence: (sequence.priority, sequence.last_access_time))
        return [sequence.sequence_id for sequence in ranked]


class Victims:
    """Chooses and evicts sequences.

    Args:
        policy: None for the LRU policy; then only `GPUKVPool.evict` evicts.
        on_evicted: called with a sequence's id and its block ids before it loses them. Without it
            `Holdings.evictions` keeps what its owner has to learn.

    Attributes:
        has_policy: a policy was given.
        num_evicted: sequences that were evicted so far.
        together: sequences of one batch, none of which is evicted for another.
    """

    def __init__(
        self,
        holdings: Holdings,
        policy: EvictionPolicy | None,
        on_evicted: Callable[[int, list[int]], object] | None,
    ) -> None:
        self._holdings = holdings
        self.has_policy = policy is not None
        self._policy = LRUEviction() if policy is None else policy
        self._on_evicted = on_evicted
        self.num_evicted = 0
        self.together: frozenset[int] = frozenset()

    def rank(self, priority: int, sequence_id: int | None) -> list[Holder]:
        """Sequences that may go for this one's sake, in the policy's order.

        Those of higher priority may not, nor those with a pinned block, nor those that a migration has.
        """
        holdings = self._holdings
        candidates = [
            SequenceInfo(holder.sequence_id, len(holder.blocks), holder.priority, holder.last_access_time)
            for holder in holdings.holders.values()
            if holder.priority <= priority
            and holder.sequence_id != sequence_id
            and holder.sequence_id not in self.together
            and holder.sequence_id not in holdings.barred
            and not holdings.pins.is_any_pinned(holder.blocks)
        ]
        allowed = {candidate.sequence_id for candidate in candidates}
        ranked = dict.fromkeys(self._policy.rank(candidates))
        return [holdings.holders[victim] for victim in ranked if victim in allowed]

    def choose(
        self,
        priority: int,
        sequence_id: int | None,
        num_blocks: int,
        has_run: Callable[[list[int]], bool] | None = None,
    ) -> list[Holder] | None:
        """The first in the policy's order that free `num_blocks` together; None if all do not.

        Args:
            has_run: called with the ids that would be free; False: more sequences have to go.
        """
        victims: list[Holder] = []
        freed_ids: list[int] = []
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

    def evict(self, victims: Sequence[Holder], for_sequence_id: int = NO_SEQUENCE) -> list[int]:
        """Take all their blocks from these sequences, one after the other.

        Args:
            for_sequence_id: the sequence that needs room; NO_SEQUENCE: the caller notifies the owners.
        Returns:
            Their ids.
        """
        for holder in victims:
            block_ids = [block.block_id for block in holder.blocks]
            if self._on_evicted is not None:
                self._on_evicted(holder.sequence_id, block_ids)
            blocks = list(holder.blocks)
            self._holdings.evictions.note(
                Eviction(holder.sequence_id, tuple(block_ids), for_sequence_id),
                is_told=self._on_evicted is not None or for_sequence_id == NO_SEQUENCE,
            )
            self._holdings.drop(blocks, {holder: blocks})
            self.num_evicted += 1
        return [holder.sequence_id for holder in victims]
