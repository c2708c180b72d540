"""Output files: results go to standard output if a file fails."""

import json

import pytest
from cli.kv_pool_command import kv_pool_command
from replay.made_trace import record, write_trace

SIZES = ("--trace-block-size", "8", "--blocks", "50")


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3]), record(32, [1, 2, 4, 5])])
    return tmp_path


def test_report_is_printed_if_the_disk_is_full(folder):
    done = kv_pool_command("replay", "trace.jsonl", *SIZES, "--json", "/dev/full", cwd=folder)
    assert done.returncode == 2
    assert json.loads(done.stdout)["requests"] == 2
    assert "No space left on device; the report is on standard output instead" in done.stderr


def test_full_disk_during_requests_output_keeps_the_result(folder):
    write_trace(folder / "long.jsonl", [record(16, [i, i + 1]) for i in range(400)])
    arguments = ("replay", "long.jsonl", *SIZES, "--requests", "/dev/full", "--json", "report.json")
    done = kv_pool_command(*arguments, cwd=folder)
    assert done.returncode == 2
    assert "token hit rate" in done.stdout
    assert json.loads((folder / "report.json").read_text())["requests"] == 400
    assert done.stderr.splitlines() == [
        "error: /dev/full: cannot write the requests: No space left on device; the file is truncated, the "
        "replay is complete"
    ]


@pytest.mark.slow
def test_second_sweep_does_not_overwrite_the_first_curve(folder):
    for name in ("sweep.png", "sweep-2.png", "sweep-3.png"):
        done = kv_pool_command("sweep", "trace.jsonl", *SIZES, cwd=folder)
        assert done.stdout.endswith(f"curve: {name}\n")
    named = kv_pool_command("sweep", "trace.jsonl", *SIZES, "--png", "sweep.png", cwd=folder)
    assert named.stdout.endswith("curve: sweep.png\n")
    assert len(list(folder.glob("sweep*.png"))) == 3
