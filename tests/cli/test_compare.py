"""`kv-pool compare`: tables, files, a picture, repetition, broken policies, interruption."""

import csv
import json
import random
import signal

import pytest
from cli.kv_pool_command import kv_pool_command, list_rows
from cli.running_commands import BOUND_S, running, wait_for_all, wait_until
from lab.compare.made_comparison import MINE
from lab.made_trace import make_random_records, write_trace

SIZES = ("--trace-block-size", "8")


@pytest.fixture
def folder(tmp_path):
    for name, seed in (("a.jsonl", 3), ("b.jsonl", 4)):
        write_trace(tmp_path / name, make_random_records(random.Random(seed), 120, 8, partial_ids=True))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def compare(folder, *options):
    return kv_pool_command("compare", *options, "--jobs", "1", cwd=folder)


@pytest.mark.slow
def test_tables_files_and_picture_have_the_same_results(folder):
    files = ("--json", "c.json", "--csv", "c.csv", "--png", "c.svg")
    done = compare(
        folder,
        "a.jsonl",
        "b.jsonl",
        *["--policies", "s3fifo,mine.py:Mine", "--blocks", "12,30", "--convention", "full_blocks"],
        *SIZES,
        *files,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "no policy is above the optimum" in done.stdout
    assert "in brackets: 95 % confidence intervals, from 1,000 samples of the " in done.stdout
    assert done.stdout.endswith("picture: c.svg\n")
    found = json.loads((folder / "c.json").read_text())
    rows = [row for trace in found["traces"] for row in trace["rows"]]
    names = ["lru", "s3fifo", "mine.py:Mine", "optimum"] * 2 + ["infinite"]
    assert [row["policy"] for row in rows] == names * 2
    cells = list_rows(done.stdout)
    shown = {"lru": "LRU", "infinite": "infinite cache"}
    assert [cell[1] for cell in cells] == [shown.get(name, name) for name in names] * 2
    assert [cell[2] for cell in cells] == [f"{row['token_hit_rate']:.2%}" for row in rows]
    assert [cell[6] for cell in cells] == [f"{row['blocks_hit']:,}" for row in rows]
    assert cells[0][0] == "12"
    assert cells[1][0] == ""
    with open(folder / "c.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["policy"] for line in lines] == names * 2
    assert [int(line["blocks_missed"]) for line in lines] == [row["blocks_missed"] for row in rows]
    assert {line["trace"] for line in lines} == {"a.jsonl", "b.jsonl"}
    picture = (folder / "c.svg").read_text()
    for label in ("LRU", "s3fifo", "mine.py:Mine", "optimum", "infinite cache", "a.jsonl", "b.jsonl"):
        assert f"<!-- {label} -->" in picture
    assert not (folder / "c.json.runs").exists()


@pytest.mark.slow
def test_comparison_is_repeated_and_what_has_changed_is_named(folder):
    first = compare(
        folder, "a.jsonl", "--policies", "mine.py:Mine", "--blocks", "12", *SIZES, "--json", "c.json"
    )
    assert first.returncode == 0, first.stderr
    same = compare(folder, "--again", "c.json")
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.endswith("the results are the same as before\n")
    (folder / "mine.py").write_text(MINE.replace("return 1 if run.num_hits else 0", "return 1"))
    write_trace(folder / "a.jsonl", make_random_records(random.Random(5), 120, 8, partial_ids=True))
    changed = compare(folder, "--again", "c.json")
    assert changed.returncode == 2
    assert "the trace a.jsonl has changed: its SHA-256 is " in changed.stdout
    assert "the policy mine.py:Mine has changed: its SHA-256 is " in changed.stdout
    assert "error: a.jsonl, lru at 12 blocks: block_hit_rate is " in changed.stderr
    assert "same as before" not in changed.stdout


def test_broken_policy_is_named_and_others_go_on(folder):
    done = compare(folder, "a.jsonl", "--policies", "mine.py:Broken,sieve", "--blocks", "12", *SIZES)
    assert done.returncode == 2
    assert done.stderr == (
        "error: mine.py:Broken at 12 blocks, a.jsonl: CachePolicyError: the cache policy mine.py:Broken is "
        "broken: freed() raised ValueError: a bug in two lines (mine.py:18)\n"
    )
    cells = {cell[1]: cell for cell in list_rows(done.stdout)}
    assert cells["mine.py:Broken"][2] == "CachePolicyError"
    assert cells["sieve"][2].endswith("%")


@pytest.mark.slow
def test_bounds_are_called_bounds(folder):
    options = "--policies sieve --blocks 30 --convention ids_as_blocks_cap --png c.svg"
    done = compare(folder, "a.jsonl", *options.split(), *SIZES)
    assert done.returncode == 0, done.stderr
    assert [cell[1] for cell in list_rows(done.stdout)] == ["LRU", "sieve", "bound", "infinite cache"]
    assert "no policy is above the bound" in done.stdout
    assert "<!-- optimum (bound) -->" in (folder / "c.svg").read_text()


def test_interrupted_command_goes_on(folder):
    """Ctrl-C during a run that takes hours leaves the finished runs, and the next call uses them."""
    (folder / "slow.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from kv_pool.core.cache_policy import CachePolicy\n"
        "class Slow(CachePolicy):\n"
        "    def start(self):\n"
        "        while not Path('go').exists():\n"
        "            time.sleep(0.05)\n"
    )
    options = ("compare", "a.jsonl", "--policies", "sieve,slow.py:Slow", "--blocks", "12", *SIZES)
    options += ("--jobs", "1", "--json", "c.json")
    finished = folder / "c.json.runs"

    def count_finished():
        return finished.read_bytes().count(b"\n") if finished.exists() else 0

    with running(folder, *options) as process:
        wait_until(lambda: count_finished() == 3, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, out, err) == (130, "", "")
        wait_for_all(process)
    assert count_finished() == 3
    assert not (folder / "c.json").exists()
    keys = [json.loads(line)["key"] for line in finished.read_text().splitlines()]
    assert len(set(keys)) == 3
    (folder / "go").touch()
    done = kv_pool_command(*options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert not finished.exists()
    assert len(json.loads((folder / "c.json").read_text())["traces"][0]["rows"]) == 5
