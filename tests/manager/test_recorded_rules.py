"""Replay recorded random schedules of vLLM's `KVCacheManager` on ours, with `PrefixRules`.

The recordings and their recipe are in tests/manager/data/. `test_parity_with_vllm_manager.py` runs vLLM
itself.
"""

import json
import lzma
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


_, RUNS = load("0_33")


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


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("release", OLDER)
def test_recorded_schedules_have_the_results_of(release, share):
    provenance, runs = load(release)
    assert provenance["vllm"].startswith(release.replace("_", "."))
    assert {run["kind"] for run in runs} == {*KINDS}
    for run in runs[::share]:
        replay(run)


@pytest.mark.parametrize("release", OLDER)
def test_other_details_than_those_of_the_release_are_found(release):
    with pytest.raises(AssertionError, match="seed"):
        replay_with({"details": {}}, load(release)[1])
