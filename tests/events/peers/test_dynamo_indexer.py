"""Dynamo's stand-alone indexer follows a pool: live, across gaps, late, and across restarts."""

import pytest
from events.deadlines import wait_for_equal, wait_until
from events.made_publisher import make_publisher
from events.peers.busy_pool import BusyPool
from events.peers.dynamo_indexer import DynamoIndexer, find_free_port
from events.peers.lossy_line import LossyLine
from events.pool_map import pool_map

from kv_pool.events.stream_state import StreamState

pytestmark = pytest.mark.dynamo

WHAT_DYNAMO_NEEDS = {"first_sequence": "clock", "heartbeat_s": 0.05}
"""Needed besides replay and a state: it sends requests when a batch arrives, and must see restarts."""


@pytest.fixture
def indexer(tmp_path):
    with DynamoIndexer(tmp_path / "indexer.log") as indexer:
        yield indexer


def make(**settings):
    return make_publisher(StreamState(), **(WHAT_DYNAMO_NEEDS | settings))


def check_knows(indexer, pool):
    """Check the overlap of each prompt, and that no other block is known."""
    assert pool.num_evicted > 0
    wait_for_equal(lambda: indexer.count_overlaps(pool.prompts), pool.count_overlaps())
    assert sum(pool.count_overlaps()) > 0
    wait_for_equal(indexer.list_hashes, {block_hash for _, _, block_hash in pool_map(pool.pool)})


@pytest.mark.parametrize("seed", range(3))
def test_indexer_matches_the_pool_while_it_runs(indexer, seed):
    pool = BusyPool(seed)
    with make() as publisher:
        indexer.attach(publisher.endpoint, publisher.replay_endpoint)
        for _ in range(4):
            pool.serve(publisher, 40)
            check_knows(indexer, pool)
        pool.reset(publisher)
        wait_for_equal(indexer.list_hashes, set())
        pool.serve(publisher, 40)
        check_knows(indexer, pool)


@pytest.mark.parametrize("buffer_steps", [10_000, 4])
def test_gap_is_filled_from_the_buffer_or_by_a_snapshot(indexer, buffer_steps):
    pool = BusyPool()
    with make(buffer_steps=buffer_steps) as publisher, LossyLine(publisher.endpoint) as line:
        indexer.attach(line.endpoint, publisher.replay_endpoint)
        pool.serve(publisher, 60)
        check_knows(indexer, pool)
        before = publisher.get_statistics()
        line.loses.set()
        pool.serve(publisher, 30)
        wait_until(lambda: line.num_lost >= 30, "lost")
        line.loses.clear()
        check_knows(indexer, pool)
        after = publisher.get_statistics()
    assert after.num_replays > before.num_replays
    assert (after.num_snapshots > before.num_snapshots) == (buffer_steps == 4)


def test_late_indexer_gets_a_snapshot(indexer):
    pool = BusyPool()
    with make(buffer_steps=4) as publisher:
        pool.serve(publisher, 100)
        indexer.attach(publisher.endpoint, publisher.replay_endpoint)
        check_knows(indexer, pool)
        assert publisher.get_statistics().num_snapshots > 0
        pool.serve(publisher, 40)
        check_knows(indexer, pool)


def test_indexer_forgets_the_old_engine_after_a_restart(indexer):
    live, replay = (f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    endpoints = {"endpoint": live, "replay_endpoint": replay}
    old, new = BusyPool(seed=0), BusyPool(seed=1)
    with make(**endpoints) as publisher:
        indexer.attach(live, replay)
        old.serve(publisher, 60)
        check_knows(indexer, old)
    with make(clock=lambda: 1700000060.5, **endpoints) as publisher:
        wait_for_equal(lambda: indexer.count_overlaps(old.prompts), [0] * len(old.prompts))
        new.serve(publisher, 60)
        check_knows(indexer, new)
    assert sum(old.count_overlaps()) > 0
