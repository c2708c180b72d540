"""`kv-pool sweep`: a row per capacity, a file, a picture."""

import csv
import json

import pytest
from cli.kv_pool_command import kv_pool_command, list_rows
from lab.made_trace import record, write_trace

TRACE = [record(24, [1, 2, 3]), record(32, [4, 5, 6, 7]), record(32, [1, 2, 8, 9])]


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", TRACE)
    return tmp_path


def sweep(folder, *options):
    return kv_pool_command("sweep", "trace.jsonl", "--trace-block-size", "8", *options, cwd=folder)


def test_capacities_are_sorted_and_each_has_a_row(folder):
    done = sweep(
        folder, "--blocks", "1_000,4,1000,50", "--jobs", "2", "--json", "sweep.json", "--csv", "s.csv"
    )
    assert done.returncode == 0, done.stderr
    cells = [row[:3] for row in list_rows(done.stdout)]
    assert cells == [
        ["4", "0.00%", "0.00%"],
        ["50", "18.18%", "18.18%"],
        ["1,000", "18.18%", "18.18%"],
    ]
    reports = json.loads((folder / "sweep.json").read_text())
    assert [report["num_blocks"] for report in reports] == [4, 50, 1000]
    assert [report["tokens_hit"] for report in reports] == [0, 16, 16]
    with open(folder / "s.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["tokens_hit"] for line in lines] == ["0", "16", "16"]
    assert (lines[0]["policy"], lines[0]["infinite_cache_tokens_hit"]) == ("lru", "16")


@pytest.mark.slow
def test_ranges_of_memory_are_combined_with_tiers(folder):
    options = "--memory 3MiB:12MiB:log3 --num-layers 2 --num-kv-heads 4 --head-size 1024"
    options += " --disk-tier 0,9 --host-tier 5"
    done = sweep(folder, *options.split(), "--jobs", "2", "--json", "sweep.json")
    assert done.returncode == 0, done.stderr
    reports = json.loads((folder / "sweep.json").read_text())
    block_bytes = 8 * 2 * 2 * 4 * 1024 * 2
    capacities = [mebibytes * 2**20 // block_bytes - 1 for mebibytes in (3, 6, 12)]
    sizes = [(report["num_blocks"], report["settings"]["disk_tier"]) for report in reports]
    assert sizes == [(capacity, disk_tier) for capacity in capacities for disk_tier in (0, 9)]
    assert {report["settings"]["block_bytes"] for report in reports} == {block_bytes}
    assert list_rows(done.stdout)[1][1:3] == ["5", "9"]
    assert "an infinite cache: 18.18% token hits" in done.stdout


@pytest.mark.slow
def test_earlier_sweeps_are_drawn_into_the_picture(folder):
    first = sweep(folder, "--blocks", "4,50", "--json", "first.json", "--jobs", "1")
    assert first.returncode == 0, first.stderr
    options = ("--convention", "ids_as_blocks", "--overlay", "first.json", "--png", "both.svg")
    done = sweep(folder, "--blocks", "4,50", *options, "--jobs", "1")
    assert done.returncode == 0, done.stderr
    picture = (folder / "both.svg").read_text()
    assert "<!-- ids_as_blocks -->" in picture
    assert "<!-- full_blocks_cap -->" in picture
    assert "infinite cache" in picture
