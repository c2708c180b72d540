"""`ReplayedBatches`: which live batches are known, because they were replayed or are in a snapshot."""

import xxhash

_MAX_FINGERPRINTS = 100_000


class ReplayedBatches:
    """What was handed on in answers, to be compared with what comes live.

    A live batch with the bytes of a replayed one is that batch again. Another one under the same number is of
    another life of the publisher.

    Memory: a fingerprint each of 100 000 replayed batches; the oldest are dropped.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[int, int] = {}
        # A replayed batch's number: live batches up to there are in a snapshot, or were called lost.
        self._passed: int | None = None
        self._last_live: int | None = None

    @property
    def passed(self) -> int | None:
        """The number up to which live batches are in a snapshot, or were called lost."""
        return self._passed

    def add(self, sequence: int, fingerprint: int) -> None:
        """Note a batch that was handed on in an answer."""
        if len(self._fingerprints) >= _MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]
        self._fingerprints[sequence] = fingerprint

    def note_live(self, sequence: int) -> None:
        """Note a batch that came live, handed on or not."""
        self._last_live = sequence

    def pass_to(self, sequence: int) -> None:
        """Note that live batches up to this number are in what was replayed, or were called lost."""
        self._passed = sequence

    def forget(self, passed: int | None = None) -> None:
        """Forget all replayed batches; `passed` as for `pass_to`."""
        self._fingerprints.clear()
        self._passed = passed

    def begin_new_life(self) -> None:
        """Forget everything: numbers begin again."""
        self.forget()
        self._last_live = None

    def contradict(self, sequence: int, payload: bytes) -> bool:
        """Return True if another batch was replayed under this number."""
        return self._fingerprints.get(sequence) not in (None, make_fingerprint(payload))

    def have(self, sequence: int, payload: bytes) -> bool:
        """Return True if this live batch was replayed, or was sent before what was replayed.

        Over one connection numbers only grow, so one that is not above the last live one was not sent before.
        """
        if self._fingerprints.get(sequence) == make_fingerprint(payload):
            return True
        if self._passed is None or sequence > self._passed:
            return False
        return self._last_live is None or sequence > self._last_live


def make_fingerprint(payload: bytes) -> int:
    """Return a number that differs between payloads, to compare bytes that are not kept."""
    return xxhash.xxh3_64_intdigest(payload)
