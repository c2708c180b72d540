"""`EventFeed`: passes a replay's events to a publisher, no faster than the publisher sends them."""

import time
from collections.abc import Callable

from kv_pool.errors import InvalidArgumentError
from kv_pool.events.event_publisher import EventPublisher
from kv_pool.manager.kv_cache_manager import KVCacheManager
from kv_pool.tiers.swapper import BlockSwapper

_MAX_QUEUED = 64
_SECONDS_BETWEEN_LOOKS = 0.001


class EventFeed:
    """Publishes the events of each request as one batch.

    A replay produces events faster than a publisher sends them. An engine would drop events rather than wait;
    a replay waits, so its stream is complete.

    Args:
        requests_per_s: maximum number of requests per second; None for no limit.
        clock, sleep: in seconds.
    Raises:
        InvalidArgumentError: `requests_per_s` is not above 0.
    """

    def __init__(
        self,
        publisher: EventPublisher,
        requests_per_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if requests_per_s is not None and not requests_per_s > 0:
            raise InvalidArgumentError(
                f"the pace is {requests_per_s} requests per second; it must be above 0"
            )
        self._publisher = publisher
        self._wait_s = 0.0 if requests_per_s is None else 1 / requests_per_s
        self._clock = clock
        self._sleep = sleep
        self._next_s = clock()

    def publish(self, manager: KVCacheManager | BlockSwapper) -> None:
        """Publish the events since the last call. Blocks until the next request may start."""
        self._publisher.publish(manager.take_events())
        while self._publisher.get_statistics().num_queued > _MAX_QUEUED:
            self._sleep(_SECONDS_BETWEEN_LOOKS)
        now_s = self._clock()
        if now_s < self._next_s:
            self._sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + self._wait_s
