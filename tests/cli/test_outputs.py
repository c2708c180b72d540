"""Output files: results go to standard output if a file fails."""

import json

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

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


@pytest.mark.parametrize(
    "command",
    ["sweep", "curve", pytest.param("compare --policies fifo --resamples 0", marks=[pytest.mark.slow])],
)
def test_pictures_are_written_only_when_asked_for(folder, command):
    """Each command used to write one, to a name of its own choice."""
    name, *options = command.split()
    done = kv_pool_command(name, "trace.jsonl", *options, *SIZES, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["trace.jsonl"]
    drawn = kv_pool_command(name, "trace.jsonl", *options, *SIZES, "--png", "here.png", cwd=folder)
    assert drawn.stdout.endswith("picture: here.png\n")
    assert (folder / "here.png").read_bytes()[:4] == b"\x89PNG"
