"""Live batches beside a replay: `QueuedBatches` wait until it is complete, `ReplayedBatches` were in it."""

from collections import deque

import xxhash

_MAX_FINGERPRINTS = 100_000


class QueuedBatches:
    """A queue of (sequence, payload) in order of arrival, bounded by count and by bytes.

    Beyond a bound the oldest batches are dropped: the publisher can still replay them. The newest batch is
    always kept, whatever its size.

    Attributes:
        num_bytes: total size of the held payloads.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> tuple[int, bytes]:
        """The oldest batch, which stays in the queue. Raises IndexError if there is none."""
        return self._batches[0]

    def append(self, sequence: int, payload: bytes) -> None:
        """Add the newest batch, and drop the oldest while a bound is exceeded."""
        self._batches.append((sequence, payload))
        self.num_bytes += len(payload)
        while len(self._batches) > max(1, self._max_batches) or (
            self.num_bytes > self._max_bytes and len(self._batches) > 1
        ):
            self.pop()

    def put_back(self, sequence: int, payload: bytes) -> None:
        """Add a batch at the front, regardless of the bounds."""
        self._batches.appendleft((sequence, payload))
        self.num_bytes += len(payload)

    def pop(self) -> tuple[int, bytes]:
        """Remove the oldest batch and return it. Raises IndexError if there is none."""
        sequence, payload = self._batches.popleft()
        self.num_bytes -= len(payload)
        return sequence, payload

    def clear(self) -> None:
        self._batches.clear()
        self.num_bytes = 0


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
