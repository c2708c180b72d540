"""Tests of the report: summaries of times, and its file."""

import random
import subprocess
from array import array

import msgspec
import pytest

from kv_pool import TraceError
from kv_pool.lab.report import (
    CallTimes,
    ReplayReport,
    Waits,
    find_commit,
    read_reports,
    summarize_calls,
    summarize_waits,
    write_json,
)


def test_call_times_summary():
    durations = list(range(1, 101))
    random.Random(0).shuffle(durations)
    assert summarize_calls(array("q", durations)) == CallTimes(100, 50, 99, 5050)
    assert summarize_calls(array("q")) == CallTimes(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("num_calls", "p99"), [(1, 1), (2, 2), (99, 99), (100, 99), (101, 100), (200, 198), (1000, 990)]
)
def test_p99_is_an_observed_duration(num_calls, p99):
    assert summarize_calls(array("q", range(1, num_calls + 1))).p99_ns == p99


def test_waits_summary():
    assert summarize_waits(array("d", [3.0, 0.0, 0.0, 1.0])) == Waits(4, 1.0, 0.5, 3.0, 3.0)
    assert summarize_waits(array("d")) == Waits()


def test_report_is_written_as_indented_json(tmp_path):
    path = tmp_path / "report.json"
    report = ReplayReport(16, 100, "full_blocks", "instant", requests=3, first_broken="é:1: no")
    write_json(report, str(path))
    text = path.read_text("utf-8")
    assert text.endswith("}\n")
    assert '\n  "num_blocks": 100,\n' in text
    assert msgspec.json.decode(text, type=ReplayReport) == report


def test_unwritable_report_raises(tmp_path):
    path = tmp_path / "nowhere" / "report.json"
    with pytest.raises(TraceError, match=r"nowhere/report\.json: cannot write the report: No such file"):
        write_json(CallTimes(), str(path))


def test_reports_are_read_from_sweep_and_replay_files(tmp_path):
    path = str(tmp_path / "reports.json")
    reports = [ReplayReport(16, size, "full_blocks", "instant") for size in (30, 10)]
    write_json(reports, path)
    assert read_reports(path) == reports
    write_json(reports[1], path)
    assert read_reports(path) == reports[1:]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot read a sweep or a replay: No such file"),
        ("[]", "the file contains no report"),
        ("{}", "not the JSON of a sweep or a replay: Object missing required field"),
        ("[" * 100_000, "not the JSON of a sweep or a replay"),
    ],
)
def test_file_without_reports_raises(tmp_path, content, why):
    path = tmp_path / "reports.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TraceError, match=rf"reports\.json: {why}"):
        read_reports(str(path))


def test_commit_is_that_of_a_checkout_or_worktree_of_kv_pool(tmp_path):
    """A worktree had none, and a package in the folder of another project had that project's commit."""
    tree, other = tmp_path / "tree", tmp_path / "other"
    tree.mkdir()

    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a")
        return subprocess.check_output(["git", "-C", tree, *who, *arguments], text=True).strip()

    git("init", "--quiet")
    (tree / "pyproject.toml").write_text('[project]\nname = "kv_pool"\n')
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    git("worktree", "add", "--quiet", other)
    commit = git("rev-parse", "HEAD")
    assert (find_commit(tree), find_commit(other), find_commit(tmp_path)) == (commit, commit, None)
    (tree / "pyproject.toml").write_text('[project]\nname = "service"\n')
    assert find_commit(tree) is None
