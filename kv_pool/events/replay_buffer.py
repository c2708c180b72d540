"""`ReplayBuffer`: the most recently sent batches, for readers that missed some."""

import threading
from bisect import bisect_left
from collections import deque
from operator import itemgetter

SentBatch = tuple[int, bytes]
"""A sequence and its payload."""


class ReplayBuffer:
    """The last `capacity` batches. One thread appends, any thread reads.

    ```text
    first_sequence ... | oldest ... a hole ... last_sequence
       dropped           in the buffer, except for holes: batches that were never sent
    ```

    Attributes:
        last_sequence: sequence of the latest batch or hole; one below the first sequence at the start.
    """

    def __init__(self, capacity: int, first_sequence: int) -> None:
        self.last_sequence = first_sequence - 1
        self._batches: deque[SentBatch] = deque(maxlen=capacity)
        # An append to a full deque shifts the indices that a search in another thread uses.
        self._lock = threading.Lock()

    def append(self, sequence: int, payload: bytes) -> None:
        """Add a batch with a higher sequence than all others; drop the oldest beyond `capacity`. O(1)."""
        with self._lock:
            self._batches.append((sequence, payload))
            self.last_sequence = sequence

    def leave_hole(self, sequence: int) -> None:
        """Record that the batch with this sequence, higher than all others, will never be sent."""
        with self._lock:
            self.last_sequence = sequence

    def list_from(self, start: int, limit: int) -> list[SentBatch]:
        """Return the first `limit` buffered batches from `start` on, in order. No bytes are copied."""
        with self._lock:
            first = bisect_left(self._batches, start, key=itemgetter(0))
            return [self._batches[index] for index in range(first, min(first + limit, len(self._batches)))]

    def has_all_from(self, start: int) -> bool:
        """Return True if `list_from` would begin with `start` itself, or if `start` is in the future."""
        with self._lock:
            if start > self.last_sequence:
                return True
            index = bisect_left(self._batches, start, key=itemgetter(0))
            return index < len(self._batches) and self._batches[index][0] == start
