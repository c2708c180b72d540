"""`LiveBacklog`: counts, bounds and frees the batches that ZeroMQ holds for slow subscribers."""

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kv_pool.events.rare_warnings import is_worth_logging
from kv_pool.events.sockets import PublisherSockets
from kv_pool.events.zmq_module import zmq

GRAIN_BYTES = 2**20
"""Unread bytes are counted to this precision."""

FRAMES_BYTES = 256
"""Approximate overhead of a batch besides its payload, in bytes."""

_MORE = int(zmq.SNDMORE)  # combining enum members takes longer than combining ints

_LOOK_AGAIN_S = 0.1
"""Polling interval while batches are unread; also the time that ZeroMQ gets to notice a closed connection."""

_logger = logging.getLogger(__name__)


class LiveBacklog:
    """The unread bytes of a PUB socket; disconnects the slowest subscribers beyond a limit.

    ```text
    batches      . . . . . M . . . M . . . . . . M . .
                 |<- span ->|<-span->|<- 1 MiB or more ->|
    ```

    ZeroMQ reports when it has released a message, at some cost. One message per MiB is tracked (M), and its
    span counts as unread until the message is released. A message that several subscribers have not read
    counts once, as ZeroMQ holds it once.

    Args:
        clock, sleep: in seconds.

    Attributes:
        num_dropped: number of disconnected subscribers.

    All calls come from the socket's thread.
    """

    def __init__(
        self,
        sockets: PublisherSockets,
        max_unread_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.num_dropped = 0
        self._clock = clock
        self._sleep = sleep
        self._sockets = sockets
        self._max_unread_bytes = max_unread_bytes
        self._since_mark = 0
        self._spans: deque[tuple[Any, int]] = deque()
        self._peak = 0
        self._trim_at = float("inf")  # shortly after a disconnection, when ZeroMQ has freed its messages

    def send(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        """Send a batch; once per MiB, disconnect subscribers while `max_unread_bytes` is exceeded."""
        self._since_mark += len(payload) + FRAMES_BYTES
        if self._since_mark < GRAIN_BYTES:
            send = self._sockets.live.send  # send_multipart takes three times as long
            send(topic, _MORE)
            send(sequence, _MORE)
            send(payload)
            return
        frame = zmq.Frame(payload, track=True, copy=False)
        self._spans.append((frame.tracker, self._since_mark))
        self._since_mark = 0
        self._sockets.live.send_multipart([topic, sequence, frame], copy=False)
        del frame  # the message is released only when this object is, too
        while self.count() > self._max_unread_bytes and self._sockets.connections.cut_slowest():
            self.num_dropped += 1
            if is_worth_logging(self.num_dropped):
                _logger.warning(
                    "%d subscribers disconnected so far: more than %d bytes were unread, and they were "
                    "furthest behind; raise max_unread_bytes to allow more",
                    self.num_dropped,
                    self._max_unread_bytes,
                )
            self._wait_for_less()
            self._trim_at = self._clock() + _LOOK_AGAIN_S
        if self._clock() >= self._trim_at:
            self.free()

    @property
    def look_again_s(self) -> float:
        """Seconds after which an idle publisher should call `free`; infinity for never."""
        return _LOOK_AGAIN_S if self._spans or self._trim_at < float("inf") else float("inf")

    def count(self) -> int:
        """Return the number of bytes in unread spans."""
        self._spans = deque(span for span in self._spans if not span[0].done)
        num_bytes = sum(num_bytes for _, num_bytes in self._spans)
        self._peak = max(self._peak, num_bytes)
        return num_bytes

    def free(self) -> None:
        """Free the messages held for closed connections, and return that memory to the system."""
        self._sockets.live.getsockopt(zmq.EVENTS)  # makes ZeroMQ free them
        if self._peak - self.count() >= GRAIN_BYTES or self._clock() >= self._trim_at:
            return_free_memory()
            self._peak = 0
            self._trim_at = float("inf")

    def _wait_for_less(self) -> None:
        """Wait briefly until the messages held for a closed connection are freed."""
        num_before = self.count()
        deadline_s = self._clock() + _LOOK_AGAIN_S
        while self.count() == num_before and self._clock() < deadline_s:
            self._sleep(0.001)
            self._sockets.live.getsockopt(zmq.EVENTS)  # makes ZeroMQ free them


def return_free_memory() -> None:
    """Return freed memory to the system, if the C library supports it.

    Without this call the process keeps the memory that it used for a slow reader. Releases the GIL.
    """
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


_LIBRARY = ctypes.CDLL(None)
