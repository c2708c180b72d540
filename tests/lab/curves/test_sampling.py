"""Tests of curves from a sample of conversations, and of their standard errors."""

import json
import random

import pytest
from lab.curves.made_reuse import read_prompts
from lab.made_trace import record, write_trace
from lab.test_schemas import validator

from kv_pool import InvalidArgumentError
from kv_pool.lab.curves.measure import measure_curves
from kv_pool.lab.curves.reuse import read_prompt_keys
from kv_pool.lab.curves.sampling import NUM_GROUPS, UnitFinder, find_group
from kv_pool.lab.report import write_json
from kv_pool.lab.settings import ReplaySettings


def make_sessions(num_sessions, num_turns, with_sessions, system=(0, 1)):
    """Return the turns of sessions in random order; each turn adds two blocks of 8 tokens."""
    rng = random.Random(num_sessions)
    turns = [number for number in range(num_sessions) for _ in range(num_turns)]
    rng.shuffle(turns)
    prompts = {}
    records = []
    for number in turns:
        ids = prompts.setdefault(number, list(system))
        first = 1000 * (number + 1) + len(ids)
        ids += [first, first + 1]
        more = {"session_id": f"session {number}"} if with_sessions else {}
        records.append(record(len(ids) * 8 + 1, list(ids), **more))
    return records


def settings_for(tmp_path, records):
    path = write_trace(tmp_path / "trace.jsonl", records)
    return ReplaySettings(str(path), 1, trace_block_size=8)


def make_finder(settings):
    return UnitFinder(settings.open_trace())


@pytest.mark.parametrize("with_sessions", [True, False], ids=["session", "root"])
def test_all_or_no_prompts_of_a_conversation_are_sampled(tmp_path, with_sessions):
    settings = settings_for(tmp_path, make_sessions(200, 4, with_sessions))
    finder = make_finder(settings)
    assert finder.unit == ("session" if with_sessions else "root")
    groups_of = {}
    for prompt in read_prompts(settings)[0]:
        conversation = prompt.keys[16:24]  # the first block after the system prompt of two blocks
        groups_of.setdefault(conversation, set()).add(find_group(finder.find(prompt), 0.25))
    assert len(groups_of) == 200
    assert all(len(groups) == 1 for groups in groups_of.values())
    groups = [group for (group,) in groups_of.values() if group is not None]
    assert 30 <= len(groups) <= 70
    assert set(groups) == set(range(NUM_GROUPS))


def test_root_of_a_prompt_that_ends_before_it_is_empty(tmp_path):
    settings = settings_for(tmp_path, [record(17, [1, 2]), record(25, [1, 2, 3])])
    finder = make_finder(settings)
    for prompt in read_prompt_keys(settings.open_trace()):
        assert find_group(finder.find(prompt), 0.999) in range(NUM_GROUPS)


def test_estimates_of_a_real_trace_are_within_their_errors():
    settings = ReplaySettings("mooncake_conversation", 1)
    capacities = [3000, 10_000, 30_000, 100_000]
    exact = measure_curves(settings, capacities)
    estimated = measure_curves(settings, capacities, sample_rate=0.3)
    assert estimated.sample.unit == "root"
    assert 0.2 < estimated.sample.requests / exact.requests < 0.45
    assert (estimated.requests, estimated.tokens_in) == (exact.requests, exact.tokens_in)
    for true, found in zip(exact.points, estimated.points, strict=True):
        for kind in ("lru", "optimum"):
            true_counts, counts = getattr(true, kind), getattr(found, kind)
            assert 0 < counts.token_rate_error < 0.04
            assert abs(counts.token_hit_rate - true_counts.token_hit_rate) < 3 * counts.token_rate_error
            assert abs(counts.block_hit_rate - true_counts.block_hit_rate) < 3 * counts.block_rate_error
            assert true_counts.token_rate_error == 0


def test_sampled_report_matches_its_schema(tmp_path):
    settings = settings_for(tmp_path, make_sessions(200, 4, with_sessions=True))
    write_json(measure_curves(settings, sample_rate=0.5), str(tmp_path / "curve.json"))
    found = json.loads((tmp_path / "curve.json").read_text())
    validator("curve").validate(found)
    assert found["sample"]["unit"] == "session"
    assert found["sample"]["groups"] == NUM_GROUPS


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, 7.0, float("nan")])
def test_rate_that_is_no_share_is_refused(tmp_path, rate):
    settings = settings_for(tmp_path, make_sessions(3, 2, with_sessions=True))
    with pytest.raises(InvalidArgumentError, match="it must be above 0 and below 1"):
        measure_curves(settings, sample_rate=rate)


def test_sample_of_too_few_conversations_is_refused(tmp_path):
    settings = settings_for(tmp_path, make_sessions(3, 2, with_sessions=True))
    with pytest.raises(InvalidArgumentError, match=r"at rate 0\.001 has 0 of 8 groups of sessions"):
        measure_curves(settings, sample_rate=0.001)
