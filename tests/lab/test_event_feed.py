"""Tests of `EventFeed`: one batch per request, no faster than the pace and the publisher."""

from types import SimpleNamespace

import pytest

from kv_pool import BlockPool, InvalidArgumentError, KVCacheManager
from kv_pool.events.event_publisher import NullEventPublisher, PublisherStatistics
from kv_pool.lab.event_feed import EventFeed


class SlowPublisher(NullEventPublisher):
    """A publisher with `num_queued` queued batches; each call of `statistics` removes one."""

    def __init__(self, num_queued=0):
        super().__init__()
        self.num_queued = num_queued

    def get_statistics(self):
        self.num_queued -= 1
        return PublisherStatistics(num_queued=self.num_queued)


@pytest.fixture
def time():
    """A clock that only `sleep` advances."""
    time = SimpleNamespace(now=50.0)
    time.clock = lambda: time.now

    def sleep(seconds):
        time.now += seconds

    time.sleep = sleep
    return time


MANAGER = KVCacheManager(BlockPool(3, True, 4))


def test_requests_follow_the_given_pace(time):
    feed = EventFeed(SlowPublisher(), 4, time.clock, time.sleep)
    ends = []
    for _ in range(4):
        feed.publish(MANAGER)
        ends.append(time.now)
    assert ends == [50.0, 50.25, 50.5, 50.75]


def test_late_requests_do_not_speed_up_later_ones(time):
    feed = EventFeed(SlowPublisher(), 4, time.clock, time.sleep)
    feed.publish(MANAGER)
    time.now += 10
    feed.publish(MANAGER)
    feed.publish(MANAGER)
    assert time.now == 60.25


def test_without_a_pace_only_the_publisher_limits(time):
    publisher = SlowPublisher(num_queued=100)
    feed = EventFeed(publisher, None, time.clock, time.sleep)
    feed.publish(MANAGER)
    assert 0 < publisher.num_queued < 100
    assert time.now > 50
    waited_until = time.now
    feed.publish(MANAGER)
    assert time.now == waited_until


@pytest.mark.parametrize("pace", [0, -1, float("nan")])
def test_invalid_pace_is_refused(pace):
    with pytest.raises(InvalidArgumentError, match="requests per second; it must be above 0"):
        EventFeed(SlowPublisher(), pace)
