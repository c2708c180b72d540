"""A complete vLLM with a real model serves the same with kv_pool's classes as with its own (marker `engine`).

Each engine runs in its own process; `.ci/peers engine` sets up vLLM's build for CPUs.
"""

import json
import random

import pytest
from core.plain_operations import find_differences
from integrations.vllm_process import list_lines, run_program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]  # several engines in each test

LEVELS = ("pool", "manager")
NUM_BLOCKS = {"full attention": 36, "windows": 40, "states": 40}  # too few for all chats at a time
MODES = {
    "synchronous": {},
    "asynchronous": {"async_scheduling": True},
    "speculative": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    },
}
VOCABULARY = range(3, 500)


def make_chats(seed, num_chats):
    """Return conversations with common beginnings; some answers are aborted."""
    choose = random.Random(seed)
    prompts = [choose.choices(VOCABULARY, k=length) for length in (70, 150)]
    chats = []
    for _ in range(num_chats):
        turns = []
        for number in range(choose.randint(1, 3)):
            tokens = choose.choices(VOCABULARY, k=choose.choice([5, 33, 60]))
            if number == 0:
                tokens = choose.choice(prompts) + tokens
            turns.append({"tokens": tokens, "max_tokens": choose.randint(5, 45)})
            if choose.random() < 0.15:
                turns[-1]["abort"] = choose.randint(1, 10)
        chats.append({"start": choose.randrange(60), "turns": turns})
    return chats


def make_scenario(kind, **engine):
    engine = {"num_gpu_blocks_override": NUM_BLOCKS[kind], **engine}
    return {"kind": kind, "level": None, "chats": make_chats(0, 14), "engine": engine, "in_one_process": True}


def run(folder, *scenarios):
    """Return what the engines did, one after the other, and their log; see `engine_chats`."""
    (folder / "scenarios.json").write_text(json.dumps(scenarios))
    environment = {"OMP_NUM_THREADS": "1", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}
    environment["TORCHDYNAMO_DISABLE"] = "1"  # vLLM compiles some functions even if told to be eager
    seen, log = run_program("engine_chats.py", folder, "", **environment)
    for scenario, one in zip(scenarios, seen, strict=True):
        if scenario["in_one_process"]:
            check_classes(one.pop("classes"), scenario)
    return seen, log


def check_classes(found, scenario):
    """Check that scheduler, manager and pool are those of the scenario."""
    scheduler, manager, pool = found
    level = scenario["level"]
    assert scheduler.endswith("async_scheduler") == scenario["engine"].get("async_scheduling", False)
    assert pool.startswith("kv_pool." if level else "vllm.")
    expected = "kv_pool." if level == "manager" else "vllm."
    assert manager.startswith(expected)


def compare(theirs, ours):
    """Return the differences of two runs: a path into what was seen, and both values."""
    return list(find_differences(theirs, ours))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("full attention", "synchronous"),
        ("full attention", "asynchronous"),
        ("windows", "synchronous"),
        ("windows", "asynchronous"),
        ("windows", "speculative"),
        ("states", "synchronous"),
    ],
)
def test_engine_serves_the_same_at_both_levels(tmp_path, kind, mode):
    scenario = make_scenario(kind, **MODES[mode])
    (theirs, *ours), _ = run(tmp_path, scenario, *(scenario | {"level": level} for level in LEVELS))
    for level, seen in zip(LEVELS, ours, strict=True):
        assert compare(theirs, seen) == [], level
    assert len(theirs["answers"]) == sum(len(chat["turns"]) for chat in scenario["chats"])
    assert any(answer["ended"] == "abort" for answer in theirs["answers"].values())
    assert theirs["counters"]["vllm:prefix_cache_hits"] > 0
    assert theirs["counters"]["vllm:num_preemptions"] > 0
    assert any("BlockRemoved" in event for event in theirs["events"])
    assert theirs["free"] == NUM_BLOCKS[kind] - 1
    # With asynchronous scheduling a request is scheduled again before the output of its last step.
    in_flight = any(set(step["in_flight"]) & set(step["tokens"]) for step in theirs["steps"])
    assert in_flight == (mode == "asynchronous")


def make_questions(seed, num_others):
    """Return chats of one turn: a long prompt, others that use all blocks, and its beginning again."""
    choose = random.Random(seed)
    beginning = choose.choices(VOCABULARY, k=128)
    prompts = [beginning + choose.choices(VOCABULARY, k=20) for _ in range(2)]
    prompts[1:1] = [choose.choices(VOCABULARY, k=300) for _ in range(num_others)]
    return [{"start": 0, "turns": [{"tokens": tokens, "max_tokens": 8}]} for tokens in prompts]


def check_answers(theirs, ours):
    """Check that the answers are equal. The logarithms of probabilities may differ by rounding."""
    assert theirs.keys() == ours.keys()
    for name, answer in theirs.items():
        assert ours[name]["tokens"] == answer["tokens"]
        for expected, found in zip(answer["logprobs"], ours[name]["logprobs"], strict=True):
            assert dict(found) == pytest.approx(dict(expected), abs=1e-4)


@pytest.mark.parametrize("kind", ["full attention", "windows"])
def test_a_retained_prefix_is_hit_and_the_answers_stay_the_same(tmp_path, kind):
    scenario = make_scenario(kind, max_num_seqs=1, num_gpu_blocks_override=40)
    chats = scenario["chats"] = make_questions(1, 6)
    ranges = [{"token_end": 128, "priority": 80}]
    chats[0]["turns"][0]["options"] = {"token_range_retention_configs": ranges}
    levels = [None, *LEVELS]
    seen, _ = run(tmp_path, *(scenario | {"level": level} for level in levels))
    first, last = "chat 0, turn 1", f"chat {len(chats) - 1}, turn 1"
    for level, one in zip(levels, seen, strict=True):
        check_answers(seen[0]["answers"], one["answers"])
        cached = [one["answers"][name]["cached"] for name in (first, last)]
        assert cached == [0, 128 if level == "manager" else 0], level


@pytest.mark.parametrize(("kind", "level"), [("full attention", "pool"), ("windows", "manager")])
def test_blocks_on_disk_are_loaded_after_a_restart(tmp_path, kind, level):
    scenario = make_scenario(kind, max_num_seqs=1, num_gpu_blocks_override=40)
    scenario["chats"] = make_questions(2, 10)
    sizes = {"host_bytes": "512KiB", "disk_bytes": "16MiB", "disk_folder": str(tmp_path / "disk")}
    connector = {
        "kv_connector": "KVPoolConnector",
        "kv_connector_module_path": "kv_pool.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": sizes,
    }
    tiered = scenario | {"level": level, "engine": scenario["engine"] | {"kv_transfer_config": connector}}
    (theirs, before, after), log = run(tmp_path, scenario, tiered, tiered)
    for seen in (before, after):
        check_answers(theirs["answers"], seen["answers"])
    assert "blocks on disk" in log
    hits = [seen["counters"]["vllm:external_prefix_cache_hits"] for seen in (before, after)]
    assert hits[1] >= 256 > hits[0]


def test_engine_in_its_own_processes_serves_the_same(tmp_path):
    scenario = make_scenario("full attention", max_num_seqs=1)  # otherwise batches depend on timing
    scenario["in_one_process"] = False
    (theirs, ours), log = run(tmp_path, scenario, scenario | {"level": "manager"})
    assert compare(theirs, ours) == []
    lines = [message for process, message in list_lines(log) if process == "EngineCore"]
    assert any(message.startswith("kv_pool uses level manager: ") for message in lines)
