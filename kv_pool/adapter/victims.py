"""`Victims`: the sequences that would lose their blocks for a request, chosen by policy."""

from kv_pool.adapter.holdings import Holder, Holdings
from kv_pool.adapter.placement import Placement
from kv_pool.adapter.pressure import EvictionPolicy, LRUEviction, SequenceInfo
from kv_pool.core.block import KVCacheBlock


class Victims:
    """Whose blocks go when too few are free. Only looks.

    Args:
        policy: None for the LRU policy.

    Attributes:
        together: sequences of one batch, none of which goes for another.
    """

    def __init__(self, holdings: Holdings, policy: EvictionPolicy | None) -> None:
        self._holdings = holdings
        self._policy = LRUEviction() if policy is None else policy
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

    def choose(self, priority: int, sequence_id: int | None, num_blocks: int) -> list[Holder] | None:
        """The first in the policy's order that free so many blocks together; None if all do not."""
        victims: list[Holder] = []
        left: dict[KVCacheBlock, int] = {}
        num_freed = 0
        if num_blocks <= 0:
            return victims
        for holder in self.rank(priority, sequence_id):
            victims.append(holder)
            num_freed += len(count_freed(holder, left))
            if num_freed >= num_blocks:
                return victims
        return None

    def choose_for_run(
        self,
        priority: int,
        sequence_id: int | None,
        num_blocks: int,
        num_available: int,
        placement: Placement,
    ) -> list[Holder] | None:
        """The fewest, in the policy's order, that leave a run of so many; None if all do not."""
        victims: list[Holder] = []
        freed: list[int] = []
        left: dict[KVCacheBlock, int] = {}
        for holder in self.rank(priority, sequence_id):
            victims.append(holder)
            freed += [block.block_id for block in count_freed(holder, left)]
            if num_blocks <= num_available + len(freed) and placement.has_run(num_blocks, freed):
                return victims
        return None


def count_freed(holder: Holder, left: dict[KVCacheBlock, int]) -> list[KVCacheBlock]:
    """The blocks that become free when this sequence goes after those that went before it.

    Args:
        left: references that would be left of blocks after those; brought up to date.
    """
    freed = []
    for block in holder.blocks:
        left[block] = left.get(block, block.ref_cnt) - 1
        if left[block] == 0:
            freed.append(block)
    return freed
