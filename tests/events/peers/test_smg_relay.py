"""SMG's relay follows a pool: live, across gaps, late, and across restarts."""

from contextlib import ExitStack, contextmanager

import pytest
from events.deadlines import wait_for_equal, wait_until
from events.made_publisher import make_publisher
from events.peers.busy_pool import BusyPool
from events.peers.dynamo_indexer import find_free_port
from events.peers.lossy_line import LossyLine
from events.pool_map import pool_map

from kv_pool.events.stream_state import StreamState

pytestmark = pytest.mark.smg


def make(**settings):
    return make_publisher(StreamState(), **({"first_sequence": "clock", "heartbeat_s": 0.05} | settings))


@contextmanager
def attached(endpoint, replay_endpoint):
    """Return a gateway that follows from some batch on; a heartbeat if the pool is idle."""
    from events.peers.smg_gateway import Gateway, SmgRelay  # needs SMG's wheel

    with SmgRelay(endpoint, replay_endpoint) as relay:
        with Gateway(relay.address) as gateway:
            wait_until(lambda: gateway.last_sequence is not None, "attached")
            yield gateway
        wait_until(lambda: len(relay.counts) > len(gateway.failures), "closed")
    assert sum(counts.hash_mismatch for counts in relay.counts) == 0


def check_knows(gateway, pool):
    """Check the overlap of each prompt, and that no other block is known."""
    assert pool.num_evicted > 0
    wait_for_equal(lambda: gateway.count_overlaps(pool.prompts), pool.count_overlaps())
    assert sum(pool.count_overlaps()) > 0
    wait_for_equal(gateway.list_hashes, hashes_of(pool))


def check_knows_no_more(gateway, publisher, pool):
    """Check, once all sent batches have arrived, that all known blocks are in the pool."""
    last_sequence = publisher.get_statistics().last_sequence
    wait_until(lambda: (gateway.last_sequence or -1) >= last_sequence, "read")
    assert gateway.list_hashes() <= hashes_of(pool)
    overlaps = zip(gateway.count_overlaps(pool.prompts), pool.count_overlaps(), strict=True)
    assert all(known <= there for known, there in overlaps)


def hashes_of(pool):
    return {block_hash for _, _, block_hash in pool_map(pool.pool)}


@pytest.mark.parametrize("first_sequence", ["zero", "clock"])
@pytest.mark.parametrize("seed", range(3))
def test_gateway_matches_the_pool_while_it_runs(seed, first_sequence):
    pool = BusyPool(seed)
    with (
        make(first_sequence=first_sequence) as publisher,
        attached(publisher.endpoint, publisher.replay_endpoint) as gateway,
    ):
        for _ in range(4):
            pool.serve(publisher, 40)
            check_knows(gateway, pool)
        pool.reset(publisher)
        wait_for_equal(gateway.list_hashes, set())
        pool.serve(publisher, 40)
        check_knows(gateway, pool)
        assert gateway.failures == []


@pytest.mark.parametrize("buffer_steps", [10_000, 4])
def test_gap_is_filled_from_the_buffer_or_by_a_snapshot(buffer_steps):
    """Snapshots used to be rejected for their number: `DATA_LOSS: not contiguous: expected 10, got 30`."""
    pool = BusyPool()
    with (
        make(buffer_steps=buffer_steps) as publisher,
        LossyLine(publisher.endpoint) as line,
        attached(line.endpoint, publisher.replay_endpoint) as gateway,
    ):
        pool.serve(publisher, 60)
        check_knows(gateway, pool)
        before = publisher.get_statistics()
        lose(line, pool, publisher)
        check_knows(gateway, pool)
        pool.serve(publisher, 40)
        check_knows(gateway, pool)
        after = publisher.get_statistics()
        assert after.num_replays > before.num_replays
        assert (after.num_snapshots > before.num_snapshots) == (buffer_steps == 4)
        assert gateway.failures == []


def test_late_gateway_knows_too_few_blocks_until_a_reset():
    pool = BusyPool()
    with make(buffer_steps=4) as publisher:
        pool.serve(publisher, 100)
        with attached(publisher.endpoint, publisher.replay_endpoint) as gateway:
            assert gateway.count_overlaps(pool.prompts) != pool.count_overlaps()
            pool.serve(publisher, 40)
            check_knows_no_more(gateway, publisher, pool)
            become_exact(gateway, publisher, pool)


@pytest.mark.parametrize("first_sequence", ["zero", "clock"])
def test_gateway_forgets_the_old_engine_after_a_restart(first_sequence):
    live, replay = (f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    settings = {"endpoint": live, "replay_endpoint": replay, "first_sequence": first_sequence}
    old, new = BusyPool(seed=0), BusyPool(seed=1)
    with make(**settings) as publisher, attached(live, replay) as gateway:
        old.serve(publisher, 60)
        check_knows(gateway, old)
        publisher.close()
        with make(clock=lambda: 1700000060.5, **settings) as publisher:
            wait_until(lambda: gateway.failures and gateway.last_sequence is not None, "attached again")
            assert gateway.list_hashes() == set()
            new.serve(publisher, 60)
            check_knows(gateway, new)
        assert {code for code, _ in gateway.failures} == {"DATA_LOSS"}


def test_gateway_detects_a_late_restart_by_clock_numbers():
    """With numbers from 0 the new engine would have passed the old number, and would fill the gap."""
    live, replay = (f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    settings = {"endpoint": live, "replay_endpoint": replay}
    old, new = BusyPool(seed=0), BusyPool(seed=1)
    with LossyLine(live) as line, ExitStack() as stack:
        with make(**settings) as publisher:
            gateway = stack.enter_context(attached(line.endpoint, replay))
            old.serve(publisher, 60)
            check_knows(gateway, old)
            line.loses.set()
        with make(clock=lambda: 1700000060.5, **settings) as publisher:
            new.serve(publisher, 120)
            line.loses.clear()
            wait_until(lambda: gateway.failures and gateway.last_sequence is not None, "attached again")
            check_knows_no_more(gateway, publisher, new)
            become_exact(gateway, publisher, new)


def lose(line, pool, publisher):
    line.loses.set()
    pool.serve(publisher, 40)
    wait_until(lambda: line.num_lost >= 40, "lost")
    line.loses.clear()


def become_exact(gateway, publisher, pool):
    """Reset the pool, which empties both; from then on the gateway is exact."""
    pool.reset(publisher)
    wait_for_equal(gateway.list_hashes, set())
    pool.serve(publisher, 40)
    check_knows(gateway, pool)
