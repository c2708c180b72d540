"""Replay recorded random schedules of vLLM's `KVCacheManager` on ours, with `PrefixRules`.

The recordings and their recipe are in tests/manager/data/. `test_parity_with_vllm_manager.py` runs vLLM
itself.
"""

import json
import lzma
from collections import Counter
from pathlib import Path

import pytest
from core.plain_operations import agree, digest, find_differences
from manager.manager_schedule import KINDS
from manager.own_manager import OwnManagerSide

DATA = Path(__file__).parent / "data"
OLDER = ("0_30", "0_31", "0_32")


def load(release):
    """Return where the recording of a release comes from, and its runs."""
    with lzma.open(DATA / f"rules_of_vllm_{release}.jsonl.xz", "rt") as recording:
        provenance, *runs = [json.loads(line) for line in recording]
    return provenance, runs


PROVENANCE, RUNS = load("0_33")


def replay(run):
    """Make the recorded calls; raise AssertionError at the first result or picture that differs."""
    side = OwnManagerSide(None, run["options"])
    recorded = zip(run["operations"], run["answers"], run["digests"], strict=True)
    for step, (operation, answer, expected) in enumerate(recorded):
        where = f"{run['kind']}, seed {run['seed']}, step {step}: {operation}"
        ours = plain(side.apply(operation))
        assert agree(answer, ours), f"{where}\nvLLM returned {answer}\nwe return     {ours}"
        picture = side.picture()
        assert digest(picture) == expected, f"{where}\nanother picture than vLLM's: {picture}"
    differences = list(find_differences(run["end"], plain(side.picture())))
    assert not differences, "\n".join(differences)


def replay_with(rule, runs=RUNS):
    for run in runs:
        options = run["options"]
        replay({**run, "options": {**options, "rules": {**options["rules"], **rule}}})


def plain(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_schedules_have_the_results_of_vllm(kind):
    for run in RUNS:
        if run["kind"] == kind:
            replay(run)


@pytest.mark.slow
@pytest.mark.parametrize("release", OLDER)
def test_recorded_schedules_have_the_results_of(release):
    provenance, runs = load(release)
    assert provenance["vllm"].startswith(release.replace("_", "."))
    assert {run["kind"] for run in runs} == {*KINDS}
    for run in runs:
        replay(run)


@pytest.mark.parametrize("release", OLDER)
def test_other_details_than_those_of_the_release_are_found(release):
    with pytest.raises(AssertionError, match="seed"):
        replay_with({"details": {}}, load(release)[1])


def test_the_recording_is_from_vllm_0_33_and_has_every_setting():
    assert PROVENANCE["vllm"].startswith("0.33.0")
    assert len(RUNS) >= 300
    rules = [run["options"]["rules"] for run in RUNS]
    assert {0, None} < {rule["interval"] for rule in rules}
    assert {bool(rule["eagle"]) for rule in rules} == {True, False}
    assert {rule["hash_ahead"] for rule in rules} == {0, 1}
    assert max(rule["prefill_ahead"] for rule in rules) > 1
    counts = Counter()
    for run in RUNS:
        for (name, *arguments), answer in zip(run["operations"], run["answers"], strict=True):
            if name == "look_up":
                sizes = [group["block_size"] for group in run["options"]["groups"]]
                counts["hits"] += answer[0] > 0
                counts["partial hits"] += any(answer[0] % size for size in sizes)
                counts["junctions"] += answer[2] > 0
            elif name == "allocate":
                counts["refusals"] += answer is None
                counts["tokens in flight"] += "in_flight" in arguments[3]
                counts["external tokens"] += "external" in arguments[3]
            elif name in ("begin_step", "take_copies"):
                counts["copies"] += len(answer)
    assert min(counts.values()) >= 40, counts
    assert len(counts) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [{"interval": None}, {"eagle": []}, {"junctions": False}, {"prefill_ahead": 0}], ids=str
)
def test_a_manager_with_another_rule_is_detected(rule):
    with pytest.raises(AssertionError, match="seed"):
        replay_with(rule)
