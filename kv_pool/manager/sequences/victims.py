"""`Victims`: evicts sequences when too few blocks are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_pool.ids import BlockId, SequenceId
from kv_pool.manager.sequences.holdings import Holder, Holdings
from kv_pool.manager.sequences.ranked_order import EvictionPolicy, LRUEviction, RankedOrder
from kv_pool.protocol import NO_SEQUENCE, Eviction


class Victims:
    """Evicts sequences, which `Holdings.order` chooses.

    Args:
        policy: None for the LRU policy, used by `GPUKVPool.evict` only.
        on_evicted: called with a sequence's id and its block ids before it loses them. Without it
            `Holdings.evictions` keeps the eviction until the owner is notified.

    Attributes:
        has_policy: whether a policy was given.
        num_evicted: number of sequences evicted so far.
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
            holdings.order = RankedOrder(holdings, policy)
        self._on_evicted = on_evicted
        self.num_evicted = 0

    def evict(self, victims: Sequence[Holder], for_sequence_id: SequenceId = NO_SEQUENCE) -> list[SequenceId]:
        """Evict these sequences, one after the other; skip those that `on_evicted` has freed.

        Args:
            for_sequence_id: the sequence that needs blocks; NO_SEQUENCE: the caller notifies the owners.
        Returns:
            The ids of the evicted sequences.
        """
        pool = self._holdings.block_pool
        holders = self._holdings.holders
        evicted: list[SequenceId] = []
        for holder in victims:
            block_ids = [block.block_id for block in holder.blocks]
            if self._on_evicted is not None and holders.get(holder.sequence_id) is holder:
                self._on_evicted(holder.sequence_id, block_ids)
            if holders.get(holder.sequence_id) is not holder:
                continue
            blocks = list(holder.blocks)
            pool.is_changing = True
            self._holdings.evictions.note(
                Eviction(holder.sequence_id, tuple(block_ids), for_sequence_id),
                is_notified=self._on_evicted is not None or for_sequence_id == NO_SEQUENCE,
            )
            self._holdings.drop(blocks, {holder: blocks})
            self.num_evicted += 1
            evicted.append(holder.sequence_id)
            pool.is_changing = False
        return evicted
