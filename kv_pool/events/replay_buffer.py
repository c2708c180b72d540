"""`ReplayBuffer`: the last batches as they were sent, for readers that missed some."""

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
       gone              listed, but for holes, whose batches were never sent
    ```

    Attributes:
        last_sequence: of the latest batch, whether it was sent or left a hole; at the start one below the
            first.
    """

    def __init__(self, capacity: int, first_sequence: int) -> None:
        self.last_sequence = first_sequence - 1
        self._batches: deque[SentBatch] = deque(maxlen=capacity)
        # Copying a deque while another thread appends to it is an error.
        self._lock = threading.Lock()

    def append(self, sequence: int, payload: bytes) -> None:
        """Keep a batch, above all the others; the oldest goes when there are too many. O(1)."""
        with self._lock:
            self._batches.append((sequence, payload))
            self.last_sequence = sequence

    def leave_hole(self, sequence: int) -> None:
        """A batch of this sequence, above all the others, was not sent and never will be."""
        with self._lock:
            self.last_sequence = sequence

    def list_from(self, start: int, limit: int) -> list[SentBatch]:
        """The first `limit` batches from `start` on that are still here, in order. No bytes are copied."""
        with self._lock:
            first = bisect_left(self._batches, start, key=itemgetter(0))
            return [self._batches[index] for index in range(first, min(first + limit, len(self._batches)))]

    def has_all_from(self, start: int) -> bool:
        """Would `list_from` begin with `start` itself? True, too, when `start` has yet to come."""
        with self._lock:
            if start > self.last_sequence:
                return True
            index = bisect_left(self._batches, start, key=itemgetter(0))
            return index < len(self._batches) and self._batches[index][0] == start
