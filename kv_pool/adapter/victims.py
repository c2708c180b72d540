"""`Victims`: chooses and evicts sequences when too few blocks are free, by an `EvictionPolicy`."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from kv_pool.adapter.holder import Holder
from kv_pool.adapter.holdings import Holdings
from kv_pool.adapter.ranked_order import RankedOrder
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

    The pool evicts as few whole sequences as suffice, and none if evicting all would not suffice. It never
    evicts one with a pinned block, of higher priority than the request that needs blocks, or the request's
    own, wherever the policy ranks it.

    The order of two sequences must follow from their `SequenceInfo`: the pool keeps it, and ranks again only
    sequences that have changed, together with some of the others. A policy that depends on more, such as the
    time, has an attribute `ranks_each_time` that is True; it ranks all sequences for each eviction.
    """

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[SequenceId]:
        """Return the ids of these sequences in the order in which to evict them.

        A sequence that is left out is not evicted, until it is ranked again: if it has changed, or if all
        others do not suffice. `sequences` is ordered by last access, least recent first. Called while the
        pool is locked.
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
        if policy is not None and type(policy) is not LRUEviction:
            ranks_each_time = bool(getattr(policy, "ranks_each_time", False))
            holdings.order = RankedOrder(
                holdings.pins,
                holdings.list_holders,
                holdings.holders,
                partial(rank_holders, policy),
                ranks_each_time,
            )
        self._on_evicted = on_evicted
        self.num_evicted = 0
        self.together: frozenset[SequenceId] = frozenset()

    def rank(self, priority: int, sequence_id: SequenceId | None) -> Generator[Holder, None, None]:
        """Yield the sequences that may be evicted for this one, in the policy's order. Change none meanwhile.

        Excludes sequences of higher priority, with a pinned block, or frozen by a migration.
        """
        with closing(self._holdings.order.iterate(priority)) as holders:
            for holder in holders:
                if (
                    holder.sequence_id != sequence_id
                    and holder.sequence_id not in self.together
                    and holder.sequence_id not in self._holdings.frozen
                ):
                    yield holder

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
        if num_blocks <= 0 and has_run is None:
            return []
        chosen = self._choose(priority, sequence_id, num_blocks, has_run)
        if chosen is None and self._holdings.order.has_excluded:
            self._holdings.order.rebuild(self._holdings.holders.values())
            chosen = self._choose(priority, sequence_id, num_blocks, has_run)
        return chosen

    def _choose(
        self,
        priority: int,
        sequence_id: SequenceId | None,
        num_blocks: int,
        has_run: Callable[[list[BlockId]], bool] | None,
    ) -> list[Holder] | None:
        victims: list[Holder] = []
        freed_ids: list[BlockId] = []
        left: dict[KVCacheBlock, int] = {}
        # Closed here: an error in a generator that Python drops would be lost.
        with closing(self.rank(priority, sequence_id)) as ranked:
            for holder in ranked:
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
        pool = self._holdings.block_pool
        for holder in victims:
            block_ids = [block.block_id for block in holder.blocks]
            if self._on_evicted is not None:
                self._on_evicted(holder.sequence_id, block_ids)
            blocks = list(holder.blocks)
            pool.is_changing = True
            self._holdings.evictions.note(
                Eviction(holder.sequence_id, tuple(block_ids), for_sequence_id),
                is_notified=self._on_evicted is not None or for_sequence_id == NO_SEQUENCE,
            )
            self._holdings.drop(blocks, {holder: blocks})
            self.num_evicted += 1
            pool.is_changing = False
        return [holder.sequence_id for holder in victims]


def rank_holders(policy: EvictionPolicy, holders: Sequence[Holder]) -> list[Holder]:
    """Return these sequences, least recently accessed first, in the order of a policy."""
    by_id: dict[SequenceId, Holder] = {}
    infos: list[SequenceInfo] = []
    for holder in holders:
        info = holder.info
        if not isinstance(info, SequenceInfo):
            info = SequenceInfo(
                holder.sequence_id, len(holder.blocks), holder.priority, holder.last_access_time
            )
            holder.info = info
        by_id[holder.sequence_id] = holder
        infos.append(info)
    return [by_id[one] for one in dict.fromkeys(policy.rank(infos)) if one in by_id]
