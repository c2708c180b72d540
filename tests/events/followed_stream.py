"""A stream from kv_pool's publisher to a subscriber that follows it, over real loopback sockets."""

import time

import zmq
from events.deadlines import wait_until
from events.made_publisher import make_publisher

from kv_pool.events.mirror import apply_item
from kv_pool.events.stream_items import BatchesLost
from kv_pool.events.stream_state import StreamState
from kv_pool.events.subscriber import KVEventSubscriber

LIMIT_S = 20


def subscribe(publisher, **options):
    return KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint, **options)


def read_until(subscriber, is_done, on_item=lambda item: None):
    """Return items until `is_done()` is true after one of them, or until none arrives in time."""
    items = []
    deadline = time.monotonic() + LIMIT_S
    while not is_done(items):
        assert time.monotonic() < deadline, items[-5:]
        for item in subscriber.poll(0.05):
            items.append(item)
            on_item(item)
    return items


def losses(items):
    return [item for item in items if isinstance(item, BatchesLost) and not item.is_healed]


def wait_until_sent(publisher, num_batches):
    wait_until(lambda: publisher.get_statistics().num_batches_sent >= num_batches, "sent")


def read_to_the_end(subscriber, publisher, num_batches, mirror):
    """Read until all published batches, or a snapshot of them, have arrived."""
    wait_until_sent(publisher, num_batches)
    end = publisher.get_statistics().last_sequence + 1
    items = read_until(
        subscriber,
        lambda _: (
            subscriber.get_statistics().next_sequence == end and not subscriber.get_statistics().is_recovering
        ),
        lambda item: apply_item(mirror, item, "pool"),
    )
    assert losses(items) == []
    return items


def our_publisher(**options):
    return make_publisher(StreamState(), time.time, **options)


class DroppingSocket:
    """A PUB socket that drops some of its messages."""

    def __init__(self, real, rng, share):
        self.real, self.rng, self.share = real, rng, share
        self.num_dropped = 0
        self.frames = []

    def send(self, frame, flags=0, **options):
        """Send or drop a frame; all frames of a message are treated alike."""
        self.frames.append((frame, flags, options))
        if flags & zmq.SNDMORE:
            return
        if self.rng.random() < self.share:
            self.num_dropped += 1
        else:
            for kept, its_flags, its_options in self.frames:
                self.real.send(kept, its_flags, **its_options)
        self.frames.clear()

    def __getattr__(self, name):
        return getattr(self.real, name)
