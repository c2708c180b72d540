"""Output files: checked before the work; results go to standard output if a file fails."""

import json

import pytest
from cli.kv_pool_command import kv_pool_command
from replay.made_trace import record, write_trace

SIZES = ("--trace-block-size", "8", "--blocks", "50")


@pytest.fixture
def folder(tmp_path):
    # The second line is broken: an error about it shows that the work had started.
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3]), record(32, [1, 2, 4, 5])])
    write_trace(tmp_path / "broken.jsonl", [record(24, [1, 2, 3]), record(32, [1])])
    (tmp_path / "folder.png").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "replay broken.jsonl --json nowhere/r.json",
            "nowhere/r.json: cannot write the report: there is no",
        ),
        ("replay broken.jsonl --json folder.png", "folder.png: cannot write the report: it is a folder"),
        (
            "sweep broken.jsonl --json nowhere/r.json",
            "nowhere/r.json: cannot write the report: there is no",
        ),
        (
            "replay broken.jsonl --requests nowhere/r.jsonl",
            "nowhere/r.jsonl: cannot write the requests: No such file",
        ),
        ("sweep broken.jsonl --png folder.png", "folder.png: cannot write the picture: it is a folder"),
        (
            "sweep broken.jsonl --png curve.xyz",
            "curve.xyz: cannot write the picture: its name must end in",
        ),
        ("sweep broken.jsonl --png curve", "curve: cannot write the picture: its name must end in"),
    ],
)
def test_unwritable_output_is_refused_before_the_work(folder, arguments, message):
    done = kv_pool_command(*arguments.split(), *SIZES, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {message}" in done.stderr


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


def test_sweep_json_is_printed_if_the_disk_is_full(folder):
    done = kv_pool_command("sweep", "trace.jsonl", *SIZES, "--json", "/dev/full", cwd=folder)
    assert done.returncode == 2
    assert [report["num_blocks"] for report in json.loads(done.stdout)] == [50]


@pytest.mark.slow
def test_second_sweep_does_not_overwrite_the_first_curve(folder):
    for name in ("sweep.png", "sweep-2.png", "sweep-3.png"):
        done = kv_pool_command("sweep", "trace.jsonl", *SIZES, cwd=folder)
        assert done.stdout.endswith(f"curve: {name}\n")
    named = kv_pool_command("sweep", "trace.jsonl", *SIZES, "--png", "sweep.png", cwd=folder)
    assert named.stdout.endswith("curve: sweep.png\n")
    assert len(list(folder.glob("sweep*.png"))) == 3
