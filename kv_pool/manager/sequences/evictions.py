"""`Evictions`: evicted sequences, until their owners are notified."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from itertools import chain

from kv_pool.errors import EvictedSequenceError
from kv_pool.ids import BlockId, BlockMove, SequenceId
from kv_pool.protocol import NO_SEQUENCE, Eviction

_MAX_KEPT = 65_536


class Evictions:
    """The last eviction of each sequence whose id is not in use again. Guarded by the pool's lock.

    An owner that was not notified (no `on_evicted`) may still use the sequence and its block ids: `check` and
    `check_ids` refuse that until `take_all` or `forget`. At most 65,536 are kept; the oldest are dropped.

    A block id does not say which sequence the caller means. Once the owner is notified, or has freed the
    blocks itself, a stale id is refused only while the block is free; then it means the new holder's block.
    """

    def __init__(self) -> None:
        self._by_sequence: OrderedDict[SequenceId, Eviction] = OrderedDict()  # removals at its head cost O(1)
        # Per evicted sequence whose owner is not notified: the block ids that the owner may still use.
        self._unnotified: dict[SequenceId, set[BlockId]] = {}
        # By block id: how many of these sets contain it.
        self._num_owners: Counter[BlockId] = Counter()

    def __len__(self) -> int:
        return len(self._by_sequence)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._by_sequence

    def note(self, eviction: Eviction, *, is_notified: bool) -> None:
        """Record an eviction.

        Args:
            is_notified: the owner is already notified; the eviction only explains errors.
        """
        sequence_id = eviction.sequence_id
        self.forget(sequence_id)
        if len(self._by_sequence) >= _MAX_KEPT:
            self.forget(next(iter(self._by_sequence)))
        self._by_sequence[sequence_id] = eviction
        if not is_notified:
            self._unnotified[sequence_id] = set()
            self._guard(sequence_id, eviction.block_ids)

    def note_moved(self, moves: Iterable[BlockMove]) -> None:
        """Also guard the new ids of moved blocks: an owner not yet notified may have updated its table."""
        if not self._unnotified:
            return
        target_of = dict(moves)
        for sequence_id, block_ids in self._unnotified.items():
            moved = block_ids & target_of.keys()
            if moved:
                self._guard(sequence_id, {target_of[one] for one in moved} - block_ids)

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop the eviction of a sequence; no-op if there is none."""
        self._by_sequence.pop(sequence_id, None)
        for block_id in self._unnotified.pop(sequence_id, ()):
            self._num_owners[block_id] -= 1
            if self._num_owners[block_id] <= 0:
                del self._num_owners[block_id]

    def take_all(self) -> list[Eviction]:
        """Drop all evictions and return them, oldest first."""
        taken = list(self._by_sequence.values())
        self._num_owners.clear()
        self._unnotified.clear()
        self._by_sequence.clear()
        return taken

    def repair(self, holders: Collection[SequenceId]) -> None:
        """Forget the evictions of sequences that hold blocks, and count the guarded ids again."""
        for sequence_id in self.list_sequences():
            if sequence_id in holders:
                self.forget(sequence_id)
        self._num_owners = Counter(chain.from_iterable(self._unnotified.values()))

    def list_sequences(self) -> list[SequenceId]:
        """Return the ids of the evicted sequences, the oldest eviction first."""
        return list(self._by_sequence)

    def begin(self, sequence_id: SequenceId) -> None:
        """Allow a new sequence to use this id.

        Raises:
            EvictedSequenceError: the evicted sequence's owner is not notified yet. Nothing has changed.
        """
        self.check(sequence_id)
        self.forget(sequence_id)

    def check(self, sequence_id: SequenceId) -> None:
        """Raise EvictedSequenceError if the sequence was evicted and its owner is not notified yet."""
        if sequence_id in self._unnotified:
            raise self.make_error(sequence_id)

    def check_ids(self, block_ids: Iterable[BlockId]) -> None:
        """Raise EvictedSequenceError if an owner not yet notified may still use one of these block ids."""
        if self._num_owners and not self._num_owners.keys().isdisjoint(block_ids):
            listed = set(block_ids)
            for sequence_id, guarded in self._unnotified.items():
                stale = listed & guarded
                if stale:
                    raise EvictedSequenceError(
                        f"block {min(stale)} may be a stale id of sequence {sequence_id}, which was "
                        f"evicted {_name_cause(self._by_sequence[sequence_id])}; name the present holder "
                        f"(sequence_id=, or migrate_sequence), or call take_evictions() first"
                    )

    def explain_id(self, block_id: BlockId) -> str:
        """Return a sentence naming the last evicted sequence that held a block, or "". O(evicted blocks)."""
        for sequence_id in reversed(self._by_sequence):
            eviction = self._by_sequence[sequence_id]
            if block_id in eviction.block_ids:
                return f"Sequence {sequence_id} held it and was evicted {_name_cause(eviction)}."
        return ""

    def _guard(self, sequence_id: SequenceId, block_ids: Collection[BlockId]) -> None:
        self._unnotified[sequence_id].update(block_ids)
        self._num_owners.update(block_ids)

    def make_error(self, sequence_id: SequenceId) -> EvictedSequenceError:
        """Return the error to raise when an evicted sequence is used."""
        eviction = self._by_sequence[sequence_id]
        return EvictedSequenceError(
            f"sequence {sequence_id} was evicted {_name_cause(eviction)}; its {len(eviction.block_ids)} "
            f"blocks may hold other data now. Start it again after free_sequence({sequence_id}) or "
            f"take_evictions(). To keep sequences, pin their blocks, or create the pool with "
            f"eviction_policy=None."
        )


def _name_cause(eviction: Eviction) -> str:
    if eviction.for_sequence_id == NO_SEQUENCE:
        return "by evict()"
    return f"to make room for sequence {eviction.for_sequence_id}"
