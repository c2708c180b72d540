"""Which sequences lose their blocks when too few are free."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


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
    """Decides who goes first.

    It is asked with sequences only that hold no pinned block, have no higher priority than the request that
    needs room, and are not the request's own. The pool evicts as few of them as make room, whole sequences,
    and none at all where even all of them would not.
    """

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[int]:
        """Ids of sequences that may go, the first to go first; those left out are safe.

        `sequences` comes in the order of last access, longest ago first. Called while the pool is locked.
        """


class LRUEviction:
    """Lower priority goes first; of equal ones what was not accessed for the longest time."""

    def rank(self, sequences: Sequence[SequenceInfo]) -> Iterable[int]:
        ranked = sorted(sequences, key=lambda sequence: (sequence.priority, sequence.last_access_time))
        return [sequence.sequence_id for sequence in ranked]
