"""`LiveBacklog`: what ZeroMQ holds for subscribers that are behind: counted, bounded, and freed."""

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
"""Unread bytes are known to this precision."""

FRAMES_BYTES = 256
"""What a batch takes besides its payload, about."""

_MORE = int(zmq.SNDMORE)  # an int of an enum takes longer to combine

_LOOK_AGAIN_S = 0.1
"""Between two looks while something is unread; also how long ZeroMQ gets to notice a closed connection."""

_logger = logging.getLogger(__name__)


class LiveBacklog:
    """Counts the bytes that the PUB socket holds; disconnects the slowest subscribers when they are too many.

    ```text
    batches      . . . . . M . . . M . . . . . . M . .
                 |<- span ->|<-span->|<- 1 MiB or more ->|
    ```

    ZeroMQ reports when it has let go of a message, at some cost. One message per MiB is watched (M), and its
    span counts as unread until it was let go of. What several subscribers have not read counts once, as
    ZeroMQ holds it once.

    Args:
        clock, sleep: seconds.

    Attributes:
        num_dropped: subscribers that were disconnected.

    One thread, that of the socket.
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
        self._trim_at = float("inf")  # a moment after a drop, when ZeroMQ has freed what it held

    def send(self, topic: bytes, sequence: bytes, payload: bytes) -> None:
        """Send a batch; then, once per MiB, disconnect subscribers while more is unread than may be."""
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
        del frame  # ZeroMQ has let go of the message when this object has, too
        while self.count() > self._max_unread_bytes and self._sockets.connections.cut_slowest():
            self.num_dropped += 1
            if is_worth_logging(self.num_dropped):
                _logger.warning(
                    "%d subscribers were disconnected so far: more than %d bytes were unread, and they were "
                    "furthest behind; max_unread_bytes admits more",
                    self.num_dropped,
                    self._max_unread_bytes,
                )
            self._wait_for_less()
            self._trim_at = self._clock() + _LOOK_AGAIN_S
        if self._clock() >= self._trim_at:
            self.free()

    @property
    def look_again_s(self) -> float:
        """When an idle publisher is to call `free`: after this time, or never."""
        return _LOOK_AGAIN_S if self._spans or self._trim_at < float("inf") else float("inf")

    def count(self) -> int:
        """Count the bytes of the spans that are unread."""
        self._spans = deque(span for span in self._spans if not span[0].done)
        num_bytes = sum(num_bytes for _, num_bytes in self._spans)
        self._peak = max(self._peak, num_bytes)
        return num_bytes

    def free(self) -> None:
        """Free what was held for connections that are closed, and give that memory back to the system."""
        self._sockets.live.getsockopt(zmq.EVENTS)  # this call frees it
        if self._peak - self.count() >= GRAIN_BYTES or self._clock() >= self._trim_at:
            return_free_memory()
            self._peak = 0
            self._trim_at = float("inf")

    def _wait_for_less(self) -> None:
        """Wait until what was held for a closed connection is freed, for a moment at most."""
        num_before = self.count()
        give_up_s = self._clock() + _LOOK_AGAIN_S
        while self.count() == num_before and self._clock() < give_up_s:
            self._sleep(0.001)
            self._sockets.live.getsockopt(zmq.EVENTS)  # this call frees it


def return_free_memory() -> None:
    """Give freed memory back to the system, where the C library can.

    Without this, what was freed for a slow reader stays with the process. Other threads run meanwhile.
    """
    trim = getattr(_LIBRARY, "malloc_trim", None)
    if trim is not None:
        trim(0)


_LIBRARY = ctypes.CDLL(None)
