"""`run_vllm_suite.py` compares two runs of the same tests: unexplained differences, outdated exceptions."""

import argparse
import json

import pytest
from integrations import check_vllm_release
from integrations.run_vllm_suite import compare, find_outdated, find_unexplained, read_exceptions

THEIRS = {
    "tests.core.test_a::test_same": "passed",
    "tests.core.test_a::test_internals": "passed",
    "tests.core.test_a::test_internals[1]": "passed",
    "tests.core.test_a.TestB::test_broken": "failed",
    "tests.core.test_c::test_gpu": "skipped",
}


@pytest.fixture
def source(tmp_path):
    (tmp_path / "tests" / "core").mkdir(parents=True)
    for name in ("test_a.py", "test_c.py", "test_d.py"):
        (tmp_path / "tests" / "core" / name).touch()
    return tmp_path


@pytest.mark.parametrize("outcome", ["failed", "skipped", None])
def test_only_exceptions_by_their_whole_id_are_explained(outcome):
    changed = {name: outcome for name in THEIRS if "internals" in name}
    ours = {name: result for name, result in (THEIRS | changed).items() if result}
    counts, different = compare(THEIRS, ours)
    assert counts["passed", "passed"] == 1
    assert counts["passed", outcome or "missing"] == 2
    assert find_unexplained(different, {}) == list(changed)
    exceptions = {"tests.core.test_a::test_internals": "reads a private table"}
    assert find_unexplained(different, exceptions) == ["tests.core.test_a::test_internals[1]"]


def test_exceptions_that_pass_or_are_gone_are_outdated(source):
    ours = THEIRS | {"tests.core.test_a::test_internals": "failed"}
    exceptions = {
        "tests.core.test_a::test_internals": "still needed",
        "tests.core.test_a::test_internals[1]": "passes now",
        "tests.core.test_a::test_renamed": "no longer there",
        "tests.core.test_d::test_not_run": "its file was not run",
        "tests.core.test_c::test_gpu": "skipped with both",
    }
    outdated = ["tests.core.test_a::test_internals[1]", "tests.core.test_a::test_renamed"]
    assert find_outdated(exceptions, ours, source) == outdated


@pytest.mark.parametrize("level", ["pool", "manager"])
def test_every_exception_has_an_id_and_a_reason(level):
    for name, reason in read_exceptions(level).items():
        assert name.startswith("tests.")
        assert "::" in name
        assert len(reason.split()) >= 3


def test_a_release_fits_with_named_exceptions_only(monkeypatch, tmp_path):
    def run(command, env):
        found = {
            "different": {"a::x": ["passed", "failed"], "a::y": ["passed", "skipped"]},
            "unexplained": ["a::y"],
        }
        (result,) = [name for name in command if str(name).endswith("result.json")]
        with open(result, "w") as file:
            json.dump(found, file)

    monkeypatch.setattr(check_vllm_release.subprocess, "run", run)
    options = argparse.Namespace(processes=1, theirs=None)
    found = check_vllm_release.run_suites(tmp_path, "manager", [], {}, options)
    assert found == ["a::y: skipped with our classes, passed with vLLM's"]
