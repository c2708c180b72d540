"""`ReplayedBatches`: recognizes live batches that were replayed or are included in a snapshot."""

import xxhash

_MAX_FINGERPRINTS = 100_000


class ReplayedBatches:
    """Fingerprints of replayed batches, to be compared with live ones.

    A live batch with the bytes of a replayed one is the same batch. A live batch with the same number and
    other bytes belongs to another incarnation of the publisher.

    Attributes:
        passed: the number up to which live batches are included in a snapshot or were reported as lost; None
            if there are none.
        last_live: the number of the last live batch, whether it was returned to the caller or not; None
            before the first one of an incarnation.

    Memory: one fingerprint for each of the last 100,000 replayed batches.
    """

    def __init__(self) -> None:
        self.passed: int | None = None
        self.last_live: int | None = None
        self._fingerprints: dict[int, int] = {}

    def add(self, sequence: int, fingerprint: int) -> None:
        """Record a replayed batch."""
        if len(self._fingerprints) >= _MAX_FINGERPRINTS:
            del self._fingerprints[next(iter(self._fingerprints))]
        self._fingerprints[sequence] = fingerprint

    def forget(self, passed: int | None = None) -> None:
        """Forget all replayed batches; set `passed`."""
        self._fingerprints.clear()
        self.passed = passed

    def begin_incarnation(self) -> None:
        """Forget all batches: the publisher has restarted."""
        self.forget()
        self.last_live = None

    def contradicts(self, sequence: int, payload: bytes) -> bool:
        """Return True if a different batch was replayed under this number."""
        return self._fingerprints.get(sequence) not in (None, make_fingerprint(payload))

    def contains(self, sequence: int, payload: bytes) -> bool:
        """Return True if this live batch was replayed, or its number is at most `passed`.

        Numbers only grow on one connection: a number up to the last live one is from another incarnation.
        """
        if self._fingerprints.get(sequence) == make_fingerprint(payload):
            return True
        if self.passed is None or sequence > self.passed:
            return False
        return self.last_live is None or sequence > self.last_live


def make_fingerprint(payload: bytes) -> int:
    """Return a 64-bit hash of a payload, to compare it with payloads that are no longer kept."""
    return xxhash.xxh3_64_intdigest(payload)
