"""`QueuedBatches`: live batches that wait until a replay is complete."""

from collections import deque


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
