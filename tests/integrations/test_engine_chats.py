"""A complete vLLM with a real model serves the same with kv_pool's classes as with its own (marker `engine`).

Each engine runs in its own process; `.ci/peers engine` sets up vLLM's build for CPUs.
"""

import json
import random

import pytest
from core.plain_operations import find_differences
from integrations.vllm_process import list_lines, run_program

pytestmark = pytest.mark.engine

LEVELS = ("pool", "manager")
NUM_BLOCKS = {"full attention": 40, "windows": 60, "states": 60}  # too few for all chats at a time
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


def run(folder, level, *, in_one_process=True, **scenario):
    """Return what an engine did with a scenario of `engine_chats`, and its log. Level None: vLLM's classes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenario.json").write_text(json.dumps({"engine": {}, **scenario}))
    return run_program(
        "engine_chats.py",
        folder,
        "kv_pool" if level else "",
        KV_POOL_VLLM=level or "",
        OMP_NUM_THREADS="1",
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_one_process else "1",
    )


def check_classes(seen, level):
    """Check that the manager and the pool are those of the level."""
    _, manager, pool = seen.pop("classes")
    assert pool.startswith("kv_pool." if level else "vllm.")
    assert manager.startswith("kv_pool." if level == "manager" else "vllm.")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("kind", NUM_BLOCKS)
def test_engine_serves_the_same_at_both_levels(tmp_path, kind, asynchronous):
    scenario = {
        "kind": kind,
        "chats": make_chats(0, 14),
        "asynchronous": asynchronous,
        "engine": {"num_gpu_blocks_override": NUM_BLOCKS[kind]},
    }
    theirs, _ = run(tmp_path / "theirs", None, **scenario)
    scheduler = theirs["classes"][0]
    check_classes(theirs, None)
    for level in LEVELS:
        ours, _ = run(tmp_path / level, level, **scenario)
        check_classes(ours, level)
        assert list(find_differences(theirs, ours)) == []
    assert len(theirs["answers"]) == sum(len(chat["turns"]) for chat in scenario["chats"])
    assert any(answer["ended"] == "abort" for answer in theirs["answers"].values())
    assert any(answer["cached"] for answer in theirs["answers"].values())
    assert any(step["preempted"] for step in theirs["steps"])
    assert any("BlockRemoved" in event for event in theirs["events"])
    assert theirs["free"] == NUM_BLOCKS[kind] - 1
    # A request is scheduled again before the output of its last step.
    assert scheduler.endswith("async_scheduler" if asynchronous else "sched.scheduler")
    assert any(set(step["in_flight"]) & set(step["tokens"]) for step in theirs["steps"]) == asynchronous
