"""Readers of other projects follow a pool: live, across gaps, late, and across restarts.

Each runs if its wheel is installed: Dynamo's stand-alone indexer, SMG's relay, vLLM's router.
"""

from contextlib import ExitStack, contextmanager

import pytest
from events.deadlines import wait_for_equal, wait_until
from events.made_publisher import make_publisher
from events.peers.busy_pool import BusyPool
from events.peers.dynamo_indexer import DynamoIndexer, find_free_port
from events.peers.lossy_line import LossyLine
from events.peers.vllm_router import AnsweringEngine, VLLMRouter
from events.pool_map import pool_map

from kv_pool.events.stream_state import StreamState


def make(first_sequence, **settings):
    """Return a publisher with what readers need: they send requests when a batch arrives."""
    settings = {"first_sequence": first_sequence, "heartbeat_s": 0.05} | settings
    return make_publisher(StreamState(), **settings)


@contextmanager
def following(name, tmp_path, endpoint, replay_endpoint):
    """Return a reader that follows a publisher from some batch on; a heartbeat if the pool is idle."""
    with ExitStack() as stack:
        if name == "dynamo":
            reader = stack.enter_context(DynamoIndexer(tmp_path / "indexer.log"))
            reader.attach(endpoint, replay_endpoint)
            yield reader
        elif name == "router":
            yield stack.enter_context(routing(tmp_path, (endpoint, replay_endpoint)))
        else:
            from events.peers.smg_gateway import Gateway, SmgRelay  # needs SMG's wheel

            relay = stack.enter_context(SmgRelay(endpoint, replay_endpoint))
            with Gateway(relay.address) as gateway:
                wait_until(lambda: gateway.last_sequence is not None, "attached")
                yield gateway
            wait_until(lambda: len(relay.counts) > len(gateway.failures), "closed")
            assert sum(counts.hash_mismatch for counts in relay.counts) == 0


@contextmanager
def routing(tmp_path, *places):
    """Return a router in front of one engine (a, b, ...) per (endpoint, replay endpoint)."""
    with ExitStack() as stack:
        engines = [stack.enter_context(AnsweringEngine("abc"[number])) for number in range(len(places))]
        sources = [(engine, *place) for engine, place in zip(engines, places, strict=True)]
        yield stack.enter_context(VLLMRouter(tmp_path / "router.log", sources))


MARKS = {"dynamo": pytest.mark.dynamo, "smg": pytest.mark.smg, "router": pytest.mark.router}


def readers(*names):
    """Return parameters: a reader and the publisher's first sequence."""
    return pytest.mark.parametrize(
        ("name", "first_sequence"),
        [pytest.param(*name.split("-"), marks=MARKS[name.split("-")[0]], id=name) for name in names],
    )


def hashes_of(pool):
    return {block_hash for _, _, block_hash in pool_map(pool.pool)}


def check_knows(reader, pool):
    """Check the overlaps of prompts and, if the reader lists its blocks, that no other is known."""
    assert pool.num_evicted > 0
    prompts = [[*prompt, 0] for prompt in pool.prompts[-25:]]  # vLLM's router never counts the last token
    expected = [pool.count_overlap(prompt) for prompt in prompts]
    assert sum(expected) > 0
    wait_for_equal(lambda: reader.count_overlaps(prompts), expected, timeout_s=30)
    if not isinstance(reader, VLLMRouter):
        wait_for_equal(reader.list_hashes, hashes_of(pool))


def check_knows_none(reader, prompts):
    prompts = prompts[-10:]
    wait_for_equal(lambda: reader.count_overlaps(prompts), [0] * len(prompts), timeout_s=30)


def lose(line, pool, publisher):
    """Publish 40 batches that do not pass the line."""
    before = line.num_lost
    line.loses.set()
    pool.serve(publisher, 40)
    wait_until(lambda: line.num_lost >= before + 40, "lost")
    line.loses.clear()


@pytest.mark.parametrize("seed", range(3))
@readers("dynamo-clock", "smg-zero", "smg-clock", "router-zero")
def test_reader_matches_the_pool_while_it_runs(name, first_sequence, seed, tmp_path):
    pool = BusyPool(seed)
    with (
        make(first_sequence) as publisher,
        following(name, tmp_path, publisher.endpoint, publisher.replay_endpoint) as reader,
    ):
        for _ in range(4):
            pool.serve(publisher, 40)
            check_knows(reader, pool)
        pool.reset(publisher)
        check_knows_none(reader, pool.prompts)
        pool.serve(publisher, 40)
        check_knows(reader, pool)
        assert getattr(reader, "failures", []) == []


@pytest.mark.parametrize("buffer_steps", [10_000, 4])
@readers("dynamo-clock", "smg-clock", "router-zero", "router-clock")
def test_gap_is_filled_from_the_buffer_or_by_a_snapshot(name, first_sequence, buffer_steps, tmp_path):
    """SMG rejected snapshots for their number: `DATA_LOSS: not contiguous: expected 10, got 30`."""
    pool = BusyPool()
    with (
        make(first_sequence, buffer_steps=buffer_steps) as publisher,
        LossyLine(publisher.endpoint) as line,
        following(name, tmp_path, line.endpoint, publisher.replay_endpoint) as reader,
    ):
        pool.serve(publisher, 60)
        check_knows(reader, pool)
        before = publisher.get_statistics()
        lose(line, pool, publisher)
        check_knows(reader, pool)
        pool.serve(publisher, 40)
        check_knows(reader, pool)
        after = publisher.get_statistics()
        assert after.num_replays > before.num_replays
        assert (after.num_snapshots > before.num_snapshots) == (buffer_steps == 4)
        assert getattr(reader, "failures", []) == []


@readers("dynamo-clock", "router-zero", "smg-clock")
def test_late_reader_gets_a_snapshot_or_is_exact_after_a_reset(name, first_sequence, tmp_path):
    pool = BusyPool()
    with make(first_sequence, buffer_steps=4) as publisher:
        pool.serve(publisher, 100)
        with following(name, tmp_path, publisher.endpoint, publisher.replay_endpoint) as reader:
            if name == "smg":
                assert reader.count_overlaps(pool.prompts) != pool.count_overlaps()
                pool.serve(publisher, 40)
                become_exact(reader, publisher, pool)
                return
            check_knows(reader, pool)
            assert publisher.get_statistics().num_snapshots > 0
            pool.serve(publisher, 40)
            check_knows(reader, pool)


def become_exact(gateway, publisher, pool):
    """Check that a gateway knows no wrong block; reset the pool, which empties both: it is exact then."""
    last_sequence = publisher.get_statistics().last_sequence
    wait_until(lambda: (gateway.last_sequence or -1) >= last_sequence, "read")
    assert gateway.list_hashes() <= hashes_of(pool)
    overlaps = zip(gateway.count_overlaps(pool.prompts), pool.count_overlaps(), strict=True)
    assert all(known <= there for known, there in overlaps)
    pool.reset(publisher)
    wait_for_equal(gateway.list_hashes, set())
    pool.serve(publisher, 40)
    check_knows(gateway, pool)


@readers("dynamo-clock", "smg-zero", "smg-clock", "router-zero")
def test_reader_forgets_the_old_engine_after_a_restart(name, first_sequence, tmp_path):
    live, replay = (f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    endpoints = {"endpoint": live, "replay_endpoint": replay}
    old, new = BusyPool(seed=0), BusyPool(seed=1)
    with ExitStack() as stack:
        with make(first_sequence, **endpoints) as publisher:
            reader = stack.enter_context(following(name, tmp_path, live, replay))
            old.serve(publisher, 60)
            check_knows(reader, old)
        with make(first_sequence, clock=lambda: 1700000060.5, **endpoints) as publisher:
            if name == "smg":
                wait_until(lambda: reader.failures and reader.last_sequence is not None, "attached again")
                assert reader.list_hashes() == set()
            new.serve(publisher, 60)
            check_knows(reader, new)
            check_knows_none(reader, old.prompts)
        assert {code for code, _ in getattr(reader, "failures", [])} <= {"DATA_LOSS"}


@readers("smg-clock")
def test_gateway_detects_a_late_restart_by_clock_numbers(name, first_sequence, tmp_path):
    """With numbers from 0 the new engine would have passed the old number, and would fill the gap."""
    live, replay = (f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    settings = {"endpoint": live, "replay_endpoint": replay}
    old, new = BusyPool(seed=0), BusyPool(seed=1)
    with LossyLine(live) as line, ExitStack() as stack:
        with make(first_sequence, **settings) as publisher:
            gateway = stack.enter_context(following(name, tmp_path, line.endpoint, replay))
            old.serve(publisher, 60)
            check_knows(gateway, old)
            line.loses.set()
        with make(first_sequence, clock=lambda: 1700000060.5, **settings) as publisher:
            new.serve(publisher, 120)
            line.loses.clear()
            wait_until(lambda: gateway.failures and gateway.last_sequence is not None, "attached again")
            become_exact(gateway, publisher, new)


@pytest.mark.router
def test_router_sends_each_prompt_to_its_longest_prefix(tmp_path):
    pools = [BusyPool(seed=0), BusyPool(seed=0)]  # the same prompts, served in another order
    pools[1].rng.seed(1)
    with make("zero") as first, make("zero") as second:
        places = [(one.endpoint, one.replay_endpoint) for one in (first, second)]
        with routing(tmp_path, *places) as router:
            for pool, publisher in zip(pools, (first, second), strict=True):
                pool.serve(publisher, 60)
            prompts = pools[0].prompts[-15:] + pools[1].prompts[-15:]
            overlaps = [[pool.count_overlap(prompt) for pool in pools] for prompt in prompts]
            decided = [
                (prompt, held) for prompt, held in zip(prompts, overlaps, strict=True) if held[0] != held[1]
            ]
            expected = ["ab"[held.index(max(held))] for _, held in decided]
            assert {*expected} == {"a", "b"}
            wait_for_equal(lambda: [router.route(prompt) for prompt, _ in decided], expected, timeout_s=30)
