"""`EventFeed`: a replay's events on their way to a publisher, no faster than they can be sent."""

import time
from collections.abc import Callable

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.event_publisher import EventPublisher
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.manager.swap.swapper import BlockSwapper
from kv_pool.replay.option import Option

EVENTS_PANEL = "Events"

PUBLISH = Option(
    "Send the pool's events from here, such as tcp://127.0.0.1:5557, port 0 for a free one; "
    "kv-pool events shows them. Token ids are those of the trace; where it has hash ids instead, an id "
    "stands for each of its tokens, and 0 for generated ones.",
    metavar="ENDPOINT",
    panel=EVENTS_PANEL,
)
PUBLISH_REPLAY = Option(
    "Where readers ask for events that they missed, such as tcp://127.0.0.1:5657.",
    metavar="ENDPOINT",
    panel=EVENTS_PANEL,
)
PUBLISH_CONFIG = Option(
    "A TOML file whose table [publisher] says how to send: topic, heartbeat_s, hwm, CURVE keys and "
    "whatever else PublisherConfig has; the two options above win over its endpoints.",
    metavar="FILE",
    panel=EVENTS_PANEL,
)

_MAX_QUEUED = 64
_SECONDS_BETWEEN_LOOKS = 0.001


class EventFeed:
    """Publishes what each request did, as one batch.

    A replay makes events faster than any publisher sends them. Where an engine loses some rather than wait, a
    replay waits: its stream has all of them.

    Args:
        requests_per_s: no more requests than so many; None for as many as can be sent.
        clock, sleep: seconds.
    Raises:
        InvalidArgumentError: a pace that is not above 0.
    """

    def __init__(
        self,
        publisher: EventPublisher,
        requests_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if requests_per_s is not None and not requests_per_s > 0:
            raise InvalidArgumentError(f"the pace is {requests_per_s} requests a second; it is above 0")
        self._publisher = publisher
        self._wait_s = 0.0 if requests_per_s is None else 1 / requests_per_s
        self._clock = clock
        self._sleep = sleep
        self._next_s = clock()

    def publish(self, manager: KVCacheManager | BlockSwapper) -> None:
        """Send what has happened since the last time, and return when the next request may begin."""
        self._publisher.publish(manager.take_events())
        while self._publisher.statistics().num_queued > _MAX_QUEUED:
            self._sleep(_SECONDS_BETWEEN_LOOKS)
        now_s = self._clock()
        if now_s < self._next_s:
            self._sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + self._wait_s
