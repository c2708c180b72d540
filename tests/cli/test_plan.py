"""`kv-pool plan`: sentences, tables, files, errors."""

import json

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

PNG = b"\x89PNG\r\n\x1a\n"
DIMENSIONS = "--num-layers 1 --num-kv-heads 1 --head-size 2"
SMALL = "--trace-block-size 8 " + DIMENSIONS
TURNS = [
    record(32, [1, 2, 3, 4] if turn % 2 else [5, 6, 7, 8], 8, timestamp=1000 * turn) for turn in range(20)
]


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", TURNS)
    return tmp_path


def plan(folder, options):
    return kv_pool_command("plan", "trace.jsonl", *options.split(), cwd=folder)


def list_rows(output, title):
    """Return the cells of the table with this title."""
    lines = output[output.index(title) :].splitlines()
    rows = []
    for line in lines[1:]:
        if line.startswith("└"):
            return rows
        if line.startswith("│"):
            rows.append([cell.strip() for cell in line.split("│")[1:-1]])
    raise AssertionError(f"no table {title}")


def test_words_tables_files_and_picture_agree(folder):
    done = plan(
        folder,
        f"{SMALL} --json plan.json --convention full_blocks --target-hit-rate 60% --png plan.png --csv c",
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "plan.json").read_text())
    assert (folder / "plan.png").read_bytes()[:8] == PNG
    assert done.stdout.endswith("picture: plan.png\n")
    assert (report["goal"], report["target_hit_rate"], report["clock"]) == ("target", 0.6, "trace")
    assert (
        f"({report['goal_blocks']:,} blocks) is the least capacity with a hit rate of 60.00%." in done.stdout
    )
    checks = list_rows(done.stdout, "predictions beside replays")
    assert [row[0] for row in checks] == [check["name"] for check in report["checks"]]
    for row, check in zip(checks, report["checks"], strict=True):
        assert row[2:4] == [f"{check['predicted']:.2%}", f"{check['replayed']:.2%}"]
        assert row[4] == f"{100 * (check['replayed'] - check['predicted']):+.2f}"
    curve = list_rows(done.stdout, "predicted, blocks of 8 tokens")
    recommended = report["recommended"]
    (row,) = (row for row in curve if "recommended" in row[-1])
    assert row[1:3] == [f"{recommended['num_blocks']:,}", f"{recommended['token_hit_rate']:.2%}"]
    capacities = [line.split(",")[0] for line in (folder / "c").read_text().splitlines()[1:]]
    assert capacities == [str(point["num_blocks"]) for point in report["points"]]
    sizes = list_rows(done.stdout, "in blocks of other sizes")
    assert [int(row[0]) for row in sizes] == [size["block_size"] for size in report["block_sizes"]]


@pytest.mark.slow
def test_instant_clock_has_no_demand(folder):
    done = plan(folder, f"{SMALL} --clock instant --json plan.json --host-memory 0 --disk-memory 1KiB")
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "plan.json").read_text())
    assert report["demand"] is None
    assert report["checks"][0]["predicted_tokens"] == report["checks"][0]["replayed_tokens"]
    assert [tier["num_blocks"] for tier in report["tiers"]] == [1024 // 64]
    assert report["checks"][0]["speedup_by_flops"] is None


@pytest.mark.slow
def test_named_models_have_flops(folder):
    done = plan(folder, "--trace-block-size 8 --model Llama-3-8B --clock instant --json plan.json")
    assert done.returncode == 0, done.stderr
    check = json.loads((folder / "plan.json").read_text())["checks"][0]
    assert 1 < check["speedup_by_flops"] < check["speedup_by_tokens"]
    assert "times in FLOPs" in done.stdout
