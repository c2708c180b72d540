"""Replays of shared prefixes through a model with states: hits, and states per request.

The workloads are those of vLLM issue 45238: 64 prompts of about 2,200 tokens over 8 shared prefixes, and
blocks of 528 tokens. With 1,600 shared tokens vLLM hit 52 times, with 1,500 never. A rule that keeps only the
ends of prompts and of shared prefixes cannot hit before the third request of each.
"""

import random

import pytest
from lab.made_trace import record, write_trace

from kv_pool.core.kv_events import BlockStored
from kv_pool.events.event_publisher import NullEventPublisher
from kv_pool.lab.event_feed import EventFeed
from kv_pool.lab.request_outcomes import RequestOutcome
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay

ID_TOKENS = 100
WORKLOADS = [(1600, 600), (1500, 700)]
ORDERS = ["turns", "groups", "random", "lengths"]


class StatePublisher(NullEventPublisher):
    """Counts the states that each request caches."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def publish(self, events):
        stored = [event for event in events if isinstance(event, BlockStored) and event.group_idx == 1]
        self.counts.append(sum(len(event.block_hashes) for event in stored))


def make_records(num_shared, num_own, order, seed):
    """Return 64 prompts over 8 prefixes; `lengths` also makes prompts up to 200 tokens shorter."""
    rng = random.Random(seed)
    prefixes = [number % 8 for number in range(64)]
    if order == "groups":
        prefixes.sort()
    elif order != "turns":
        rng.shuffle(prefixes)
    records = []
    for number, prefix in enumerate(prefixes):
        length = num_shared + num_own - (rng.randrange(200) if order == "lengths" else 0)
        shared = [prefix * 1000 + index for index in range(num_shared // ID_TOKENS)]
        num_ids = -(-length // ID_TOKENS)
        own = [(number + 8) * 1000 + index for index in range(num_ids - len(shared))]
        records.append(record(length, shared + own))
    return records


def replay(tmp_path, records, states, **changes):
    """Return the number of requests with a hit, the outcomes, and the number of states of each request."""
    path = write_trace(tmp_path / "trace.jsonl", records)
    outcomes: list[RequestOutcome] = []
    settings = {"num_blocks": 3000, "block_size": 528, "trace_block_size": ID_TOKENS} | changes
    publisher = StatePublisher()
    replayed = ReplaySettings(str(path), groups="full,mamba", states=states, **settings)
    run_replay(replayed, feed=EventFeed(publisher), on_outcome=outcomes.append)
    return sum(outcome.tokens_hit > 0 for outcome in outcomes), outcomes, publisher.counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_bounded_states_miss_the_first_prompt_of_a_prefix_only(workload, order, seed, tmp_path):
    """The goal is 52 hits in both workloads, with at most 2 states per request."""
    num_hits, _, states = replay(tmp_path, make_records(*workload, order, seed), "bounded")
    assert num_hits == 56
    assert max(states) <= 2


@pytest.mark.parametrize("workload", WORKLOADS)
def test_checkpoints_hit_from_the_third_prompt_of_a_prefix(workload, tmp_path):
    num_hits, _, states = replay(tmp_path, make_records(*workload, "turns", 0), "checkpoints")
    assert num_hits == 48
    assert max(states) <= 2


@pytest.mark.parametrize("workload", WORKLOADS)
def test_states_at_the_ends_of_prompts_alone_are_not_shared(workload, tmp_path):
    num_hits, _, states = replay(tmp_path, make_records(*workload, "turns", 0), "steps")
    assert num_hits == 0
    assert max(states) == 1


@pytest.mark.parametrize("workload", WORKLOADS)
def test_states_at_every_block_hit_whole_prefixes(workload, tmp_path):
    _, outcomes, states = replay(tmp_path, make_records(*workload, "turns", 0), "blocks")
    assert max(states) == 2200 // 528
    assert {outcome.tokens_hit for outcome in outcomes} == {0, workload[0] // 528 * 528}
