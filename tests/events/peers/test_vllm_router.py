"""vLLM's router follows pools and routes by their blocks: live, across gaps, late, and across restarts.

Runs if the wheel is installed: `pip install vllm-router==0.1.17`; no GPU, no model, no network.
"""

from contextlib import ExitStack, contextmanager

import pytest
from events.deadlines import wait_for_equal, wait_until
from events.made_publisher import make_publisher
from events.peers.busy_pool import BusyPool
from events.peers.dynamo_indexer import find_free_port
from events.peers.lossy_line import LossyLine
from events.peers.vllm_router import AnsweringEngine, VLLMRouter

from kv_pool.events.stream_state import StreamState

pytestmark = pytest.mark.router

WHAT_THE_ROUTER_NEEDS = {"first_sequence": "zero", "heartbeat_s": 0.05, "topic": ""}
"""Numbers from 0: a router that connects late requests 0 and accepts only an answer that starts there."""


def make(**settings):
    return make_publisher(StreamState(), **(WHAT_THE_ROUTER_NEEDS | settings))


@contextmanager
def routing(tmp_path, *places):
    """A router in front of one engine (a, b, ...) per (endpoint, replay endpoint)."""
    with ExitStack() as stack:
        engines = [stack.enter_context(AnsweringEngine("abc"[number])) for number in range(len(places))]
        sources = [(engine, *place) for engine, place in zip(engines, places, strict=True)]
        yield stack.enter_context(VLLMRouter(tmp_path / "router.log", sources))


def check_knows(router, pool):
    """Check the overlap of each prompt plus one token: the router never counts the last token as held."""
    assert pool.num_evicted > 0
    prompts = [[*prompt, 0] for prompt in pool.prompts[-25:]]
    expected = [pool.count_overlap(prompt) for prompt in prompts]
    assert sum(expected) > 0
    wait_for_equal(lambda: router.count_overlaps(prompts), expected, timeout_s=30)


def test_router_sends_each_prompt_to_its_longest_prefix(tmp_path):
    pools = [BusyPool(seed=0), BusyPool(seed=0)]  # the same prompts, served in another order
    pools[1].rng.seed(1)
    with make() as first, make() as second:
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


def test_router_matches_the_pool_while_it_runs(tmp_path):
    pool = BusyPool()
    with make() as publisher, routing(tmp_path, (publisher.endpoint, publisher.replay_endpoint)) as router:
        for _ in range(3):
            pool.serve(publisher, 40)
            check_knows(router, pool)
        pool.reset(publisher)
        prompts = pool.prompts[:5]
        wait_for_equal(lambda: router.count_overlaps(prompts), [0] * 5)
        pool.serve(publisher, 40)
        check_knows(router, pool)


@pytest.mark.parametrize("first_sequence", ["zero", "clock"])
@pytest.mark.parametrize("buffer_steps", [10_000, 4])
def test_router_is_exact_after_a_gap(tmp_path, buffer_steps, first_sequence):
    pool = BusyPool()
    settings = {"buffer_steps": buffer_steps, "first_sequence": first_sequence}
    with make(**settings) as publisher, LossyLine(publisher.endpoint) as line:
        with routing(tmp_path, (line.endpoint, publisher.replay_endpoint)) as router:
            pool.serve(publisher, 60)
            check_knows(router, pool)
            before = publisher.get_statistics()
            line.loses.set()
            pool.serve(publisher, 30)
            wait_until(lambda: line.num_lost >= 30, "lost")
            line.loses.clear()
            check_knows(router, pool)
        after = publisher.get_statistics()
    assert after.num_replays > before.num_replays
    assert (after.num_snapshots > before.num_snapshots) == (buffer_steps == 4)


def test_late_router_is_exact(tmp_path):
    pool = BusyPool()
    with make(buffer_steps=4) as publisher:
        pool.serve(publisher, 100)
        with routing(tmp_path, (publisher.endpoint, publisher.replay_endpoint)) as router:
            check_knows(router, pool)
            pool.serve(publisher, 40)
            check_knows(router, pool)


def test_router_knows_the_new_engine_after_a_restart(tmp_path):
    place = tuple(f"tcp://127.0.0.1:{find_free_port()}" for _ in range(2))
    endpoints = {"endpoint": place[0], "replay_endpoint": place[1]}
    old, new = BusyPool(seed=0), BusyPool(seed=1)
    with ExitStack() as stack:
        with make(**endpoints) as publisher:
            router = stack.enter_context(routing(tmp_path, place))
            old.serve(publisher, 60)
            check_knows(router, old)
        with make(clock=lambda: 1700000060.5, **endpoints) as publisher:
            new.serve(publisher, 60)
            check_knows(router, new)
            prompts = old.prompts[-10:]
            wait_for_equal(lambda: router.count_overlaps(prompts), [0] * len(prompts))
