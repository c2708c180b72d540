"""`Evictions`: sequences that lost their blocks, until their owners know."""

from collections.abc import Iterable

from kv_pool.errors import EvictedSequenceError
from kv_pool.protocol import NO_SEQUENCE, Eviction

_MAX_KEPT = 65_536


class Evictions:
    """The last eviction of each sequence whose id was not used again. The pool's lock guards it.

    An owner that was not told (no `on_evicted`) may still use the sequence and its block ids: `check` and
    `check_ids` refuse that until `take_all` or `forget`. At most 65,536 are kept; the oldest are dropped.
    """

    def __init__(self) -> None:
        self._by_sequence: dict[int, Eviction] = {}
        self._untold: set[int] = set()
        # By block id: how many untold evictions have it.
        self._num_owners: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_sequence

    def note(self, eviction: Eviction, *, is_told: bool) -> None:
        """Keep an eviction.

        Args:
            is_told: the owner knows already; the eviction only explains errors.
        """
        sequence_id = eviction.sequence_id
        self.forget(sequence_id)
        if len(self._by_sequence) >= _MAX_KEPT:
            self.forget(next(iter(self._by_sequence)))
        self._by_sequence[sequence_id] = eviction
        if not is_told:
            self._untold.add(sequence_id)
            for block_id in eviction.block_ids:
                self._num_owners[block_id] = self._num_owners.get(block_id, 0) + 1

    def forget(self, sequence_id: int) -> None:
        """Drop the eviction of a sequence; do nothing where there is none."""
        eviction = self._by_sequence.pop(sequence_id, None)
        if eviction is None or sequence_id not in self._untold:
            return
        self._untold.discard(sequence_id)
        for block_id in eviction.block_ids:
            num_owners = self._num_owners.get(block_id, 0) - 1
            if num_owners > 0:
                self._num_owners[block_id] = num_owners
            else:
                self._num_owners.pop(block_id, None)

    def take_all(self) -> list[Eviction]:
        """Drop all evictions and return them, oldest first."""
        taken = list(self._by_sequence.values())
        self._num_owners.clear()
        self._untold.clear()
        self._by_sequence.clear()
        return taken

    def list_sequences(self) -> list[int]:
        """Return the ids of the evicted sequences, that of the first eviction first."""
        return list(self._by_sequence)

    def begin(self, sequence_id: int) -> None:
        """Let a new sequence have this id.

        Raises:
            EvictedSequenceError: the owner of the evicted one was not told. Nothing has changed.
        """
        self.check(sequence_id)
        self.forget(sequence_id)

    def check(self, sequence_id: int) -> None:
        """Raise EvictedSequenceError where a sequence was evicted and its owner was not told."""
        if sequence_id in self._untold:
            raise self.make_error(sequence_id)

    def check_ids(self, block_ids: Iterable[int]) -> None:
        """Raise EvictedSequenceError where an owner that was not told may still take a block for its own."""
        if self._num_owners and not self._num_owners.keys().isdisjoint(block_ids):
            listed = set(block_ids)
            for sequence_id, eviction in self._by_sequence.items():
                stale = listed.intersection(eviction.block_ids)
                if stale and sequence_id in self._untold:
                    raise EvictedSequenceError(
                        f"block {min(stale)} may be meant as one of sequence {sequence_id}, which was "
                        f"evicted {_name_cause(eviction)}; pass the sequence_id of its present holder, or "
                        f"call take_evictions() first"
                    )

    def make_error(self, sequence_id: int) -> EvictedSequenceError:
        """Return the error for the use of an evicted sequence."""
        eviction = self._by_sequence[sequence_id]
        return EvictedSequenceError(
            f"sequence {sequence_id} was evicted {_name_cause(eviction)}; its {len(eviction.block_ids)} "
            f"blocks may hold other data now. Begin it again after free_sequence({sequence_id}) or "
            f"take_evictions(). To keep sequences, pin their blocks, or make the pool with "
            f"eviction_policy=None."
        )


def _name_cause(eviction: Eviction) -> str:
    if eviction.for_sequence_id == NO_SEQUENCE:
        return "by evict()"
    return f"to make room for sequence {eviction.for_sequence_id}"
