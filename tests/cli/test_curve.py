"""`kv-pool curve`: a table, the knee, files and a picture."""

import csv
import json

import pytest
from cli.kv_pool_command import kv_pool_command, list_rows
from lab.made_trace import record, write_trace

TRACE = [
    record(24, [1, 2, 3]),
    record(32, [4, 5, 6, 7]),
    record(32, [1, 2, 8, 9]),
    record(41, [4, 5, 6, 7, 10]),
]
PNG = b"\x89PNG\r\n\x1a\n"
PICTURE = ("--png", "curve.png")


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", TRACE)
    return tmp_path


def curve(folder, *options):
    return kv_pool_command("curve", "trace.jsonl", "--trace-block-size", "8", *options, cwd=folder)


def test_table_files_and_picture_agree(folder):
    done = curve(folder, "--blocks", "3,6,8,20", "--json", "curve.json", "--csv", "curve.csv", *PICTURE)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "curve.json").read_text())
    with open(folder / "curve.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = list_rows(done.stdout)
    assert [row[:2] for row in cells] == [["3", "3"], ["6", "0"], ["8", "0"], ["20", "0"]]
    for shown, point, row in zip(cells, report["points"], rows, strict=True):
        lru, optimum = point["lru"], point["optimum"]
        rates = [counts[f"{kind}_hit_rate"] for kind in ("token", "block") for counts in (lru, optimum)]
        assert shown[2:6] == [f"{rate:.2%}" for rate in rates]
        assert int(row["lru_tokens_hit"]) == lru["tokens_hit"]
    assert [point["lru"]["blocks_hit"] for point in report["points"]] == [0, 4, 6, 6]
    assert [point["optimum"]["blocks_hit"] for point in report["points"]] == [0, 4, 6, 6]
    assert "below 6 blocks, pools refuse requests that are larger" in done.stdout
    assert done.stdout.endswith("picture: curve.png\n")
    assert (folder / "curve.png").read_bytes()[:8] == PNG


@pytest.mark.slow
def test_default_capacities_name_the_knee(folder):
    write_trace(folder / "trace.jsonl", TRACE * 3)
    done = curve(folder, "--png", "picture.png", "--model", "llama-3-8b", "--json", "curve.json")
    assert done.returncode == 0, done.stderr
    knee = json.loads((folder / "curve.json").read_text())["knee"]
    assert f"knee: {knee} blocks (0.0 GiB), " in done.stdout
    assert "infinite cache" in done.stdout


@pytest.mark.slow
def test_sample_shows_standard_errors(folder):
    sessions = [
        record(8 * turn + 8, [100 * name + block for block in range(turn + 1)], session_id=name)
        for turn in range(3)
        for name in range(40)
    ]
    write_trace(folder / "trace.jsonl", sessions)
    done = curve(folder, "--sample", "0.5", "--blocks", "100")
    assert done.returncode == 0, done.stderr
    assert " of 120 requests, sampled by session; ± is one standard error" in done.stdout
    assert done.stdout.count("% ±") == 4
    assert "blocks in the sample" in done.stdout
