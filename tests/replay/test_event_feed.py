"""A feed sends a batch a request and holds the replay back: to its pace, and to that of the publisher."""

from types import SimpleNamespace

import pytest

from kv_pool import BlockPool, InvalidArgumentError, KVCacheManager
from kv_pool.events.event_publisher import NullEventPublisher, PublisherStatistics
from kv_pool.replay.event_feed import EventFeed


class SlowPublisher(NullEventPublisher):
    """Has so many batches to send still; one less at each look."""

    def __init__(self, num_queued=0):
        super().__init__()
        self.num_queued = num_queued

    def statistics(self):
        self.num_queued -= 1
        return PublisherStatistics(num_queued=self.num_queued)


@pytest.fixture
def time():
    """A clock on which only sleeping takes time."""
    time = SimpleNamespace(now=50.0)
    time.clock = lambda: time.now

    def sleep(seconds):
        time.now += seconds

    time.sleep = sleep
    return time


MANAGER = KVCacheManager(BlockPool(3, True, 4))


def test_requests_come_at_the_pace_that_was_asked_for(time):
    feed = EventFeed(SlowPublisher(), 4, time.clock, time.sleep)
    ends = []
    for _ in range(4):
        feed.publish(MANAGER)
        ends.append(time.now)
    assert ends == [50.0, 50.25, 50.5, 50.75]


def test_time_that_a_request_took_too_long_is_not_caught_up_with(time):
    feed = EventFeed(SlowPublisher(), 4, time.clock, time.sleep)
    feed.publish(MANAGER)
    time.now += 10
    feed.publish(MANAGER)
    feed.publish(MANAGER)
    assert time.now == 60.25


def test_without_a_pace_it_waits_for_the_publisher_alone(time):
    publisher = SlowPublisher(num_queued=100)
    feed = EventFeed(publisher, None, time.clock, time.sleep)
    feed.publish(MANAGER)
    assert 0 < publisher.num_queued < 100
    assert time.now > 50
    waited_until = time.now
    feed.publish(MANAGER)
    assert time.now == waited_until


@pytest.mark.parametrize("pace", [0, -1, float("nan")])
def test_a_pace_that_can_not_be_meant_is_refused(pace):
    with pytest.raises(InvalidArgumentError, match="requests a second; it is above 0"):
        EventFeed(SlowPublisher(), pace)
