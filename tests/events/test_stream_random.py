"""Random histories of a pool over real sockets: a follower of the stream gets the pool's map."""

import random
from contextlib import ExitStack

from core.plain_operations import run
from core.pool_operations import PoolSide
from events.event_schedule import EventSchedule
from events.followed_stream import DroppingSocket, our_publisher, read_to_the_end, subscribe, wait_until_sent
from events.pool_map import pool_map
from hypothesis import given, settings
from hypothesis import strategies as st

import kv_pool
from kv_pool.events.mirror import PrefixMirror, apply_item

NUM_STEPS = 80


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    buffer_steps=st.sampled_from([2, 10, 1000]),
    lost_share=st.sampled_from([0.0, 0.05, 0.3]),
    starts_at=st.integers(0, NUM_STEPS - 1),
    is_replaced=st.booleans(),
)
def test_mirror_matches_the_pool_after_random_events(seed, buffer_steps, lost_share, starts_at, is_replaced):
    """Stores, evictions, duplicates, resets, partial blocks, groups; lost batches, late and new readers."""
    schedule = EventSchedule(seed)
    side = PoolSide(kv_pool, schedule.options)
    pool = side.pools["gpu"]
    subscriber = None
    with ExitStack() as opened:
        publisher = opened.enter_context(our_publisher(buffer_steps=buffer_steps, first_sequence="clock"))
        live = DroppingSocket(publisher._sockets.live, random.Random(seed), lost_share)
        publisher._sockets.live = live
        num_published = 0
        for number, _ in enumerate(run(schedule, side, num_steps=NUM_STEPS)):
            if number == starts_at or (is_replaced and number == (starts_at + NUM_STEPS) // 2):
                subscriber = opened.enter_context(subscribe(publisher))
                mirror = PrefixMirror()
            if events := pool.take_events():
                publisher.publish(events)
                num_published += 1
            if subscriber is not None and number % 5 == 0:
                for item in subscriber.poll():
                    apply_item(mirror, item, "pool")
        wait_until_sent(publisher, num_published)
        live.share = 0.0
        publisher.publish(pool.take_events() or [kv_pool.BlockRemoved([1], "GPU")])
        read_to_the_end(subscriber, publisher, num_published + 1, mirror)
    assert mirror.get_blocks("pool") == pool_map(pool)
