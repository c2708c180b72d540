"""`kv-pool replay`: the table, the file, and every way to give the capacity."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest
from cli.kv_pool_command import kv_pool_command
from replay.made_trace import record, write_trace

from kv_pool import __version__
from kv_pool.events.continuity import ReceivedBatch
from kv_pool.events.subscriber import KVEventSubscriber

TRACE = [record(24, [1, 2, 3], 5, 0), record(32, [1, 2, 4, 5], 9, 10), record(16, [6, 7], 2, 900)]


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.gz", TRACE)
    return tmp_path


def replay(folder, *options):
    done = kv_pool_command(
        "replay", "trace.gz", "--trace-block-size", "8", "--json", "report.json", *options, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "report.json").read_text())


def rows(stdout):
    """The table's first two columns."""
    cells = [line.split("│") for line in stdout.splitlines() if line.startswith("│")]
    return {line[1].strip(): line[2].strip() for line in cells}


def test_the_table_and_the_file_say_the_same(folder):
    stdout, report = replay(folder, "--blocks", "20")
    assert "trace.gz through 20 blocks of 8 tokens" in stdout
    table = rows(stdout)
    assert table["requests"] == "3"
    assert table["refused"] == "0"
    assert table["token hit rate"] == "22.22%"
    assert table["block hit rate"] == "22.22%"
    assert (report["requests"], report["refused_requests"]) == (3, 0)
    assert (report["tokens_hit"], report["tokens_in"]) == (16, 72)
    assert (report["blocks_hit"], report["blocks_looked_up"]) == (2, 9)


def test_the_file_says_how_to_do_it_again(folder):
    _, report = replay(folder, "--blocks", "20", "--seed", "7")
    provenance = report["provenance"]
    assert provenance["command"][1:4] == ["replay", "trace.gz", "--trace-block-size"]
    assert provenance["trace_sha256"] == hashlib.sha256((folder / "trace.gz").read_bytes()).hexdigest()
    assert provenance["kv_pool"] == __version__
    assert report["settings"]["seed"] == "7"


def test_the_trace_clock_shows_preemptions_and_time(folder):
    stdout, report = replay(
        folder,
        *("--blocks", "6", "--clock", "trace", "--prefill-rate", "1000", "--decode-rate", "100"),
        *("--convention", "ids_as_blocks_cap", "--max-running", "9", "--speedup", "2", "--limit", "2"),
    )
    table = rows(stdout)
    assert table["requests"] == "2"
    assert table["preempted"] == str(report["preempted"])
    assert "simulated time" in table
    # The first holds 3 blocks, 4 from 24 to 74. The second arrives at 5, shares two of them and has 2 more;
    # at 40 it needs a third and loses them; from 74 to 82 it computes 8 tokens anew.
    assert report["preempted"] == 1
    assert report["simulated_ms"] == 82 + 90
    assert report["tokens_out"] == 14
    assert report["convention"] == "ids_as_blocks_cap"
    assert report["settings"]["speedup"] == 2.0


def test_capacity_may_be_the_memory_of_a_model(folder):
    # 8 tokens of 131 072 bytes are 1 MiB; one block is the null block.
    _, report = replay(folder, "--memory", "1GiB", "--model", "llama-3-8b")
    assert report["num_blocks"] == 1023


def test_capacity_may_be_the_memory_of_any_dimensions(folder):
    dimensions = ("--num-layers", "4", "--num-kv-heads", "2", "--head-size", "8", "--dtype-bytes", "1")
    _, report = replay(folder, "--memory", "16KiB", "--block-size", "4", *dimensions)
    assert report["block_size"] == 4
    assert report["num_blocks"] == 16 * 1024 // (4 * 2 * 2 * 8 * 4) - 1


def test_broken_lines_that_were_passed_over_are_shown(folder):
    write_trace(folder / "trace.gz", [TRACE[0], "not json", TRACE[1], "{}"])
    stdout, report = replay(folder, "--blocks", "20", "--skip-broken")
    assert rows(stdout)["broken lines"] == "2"
    assert "trace.gz:2: " in stdout
    assert (report["requests"], report["broken_lines"]) == (2, 2)


def test_a_bundled_trace_goes_by_its_name(tmp_path):
    done = kv_pool_command(
        "replay", "mooncake_conversation", "--blocks", "1000", "--limit", "100", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "mooncake_conversation.jsonl.gz through 1,000 blocks of 512 tokens" in done.stdout
    assert rows(done.stdout)["requests"] == "100"
    assert "late" not in rows(done.stdout)


def test_runs_of_consecutive_ids_may_be_preferred(folder):
    _, report = replay(folder, "--blocks", "20", "--runs")
    assert report["settings"]["runs"] is True


def test_its_events_can_be_read_while_it_runs(folder):
    write_trace(folder / "long.jsonl", [record(8, [number]) for number in range(100_000)])
    options = "--blocks 20 --trace-block-size 8 --pace 20"
    endpoints = ("--publish", "tcp://127.0.0.1:0", "--publish-replay", "tcp://127.0.0.1:0")
    process = subprocess.Popen(
        [sys.executable, "-m", "kv_pool.cli.main", "replay", "long.jsonl", *options.split(), *endpoints],
        cwd=folder,
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
    )
    with process:
        try:
            line = process.stdout.readline()
            told = re.fullmatch(r"in a second terminal: kv-pool events (\S+) --replay (\S+)\n", line)
            with KVEventSubscriber(*told.groups()) as subscriber:
                batches = [item for item, _ in zip(subscriber, range(3), strict=False)]
        finally:
            process.kill()
    assert all(isinstance(item, ReceivedBatch) for item in batches)
    assert [item.sequence for item in batches] == [0, 1, 2]
    assert [event.token_ids for item in batches for event in item.batch.events] == [[0] * 8, [1] * 8, [2] * 8]


def test_its_publisher_may_be_described_in_a_file(folder):
    (folder / "publisher.toml").write_text(
        '[publisher]\nendpoint = "tcp://127.0.0.1:0"\nreplay_endpoint = "tcp://127.0.0.1:0"\n'
    )
    options = "--blocks 20 --publish-config publisher.toml --pace 1000"
    done = kv_pool_command("replay", "trace.gz", *options.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.match(r"in a second terminal: kv-pool events tcp://\S+ --replay tcp://\S+\n", done.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--publish-config wrong.toml", "wrong.toml: [publisher]: unknown 'topics' for a publisher"),
        ("--pace 3", "--pace is about events; give --publish, too"),
        ("--publish tcp://127.0.0.1:0 --pace 0", "the pace is 0.0 requests a second; it is above 0"),
        ("--publish nowhere", "endpoint is 'nowhere'; write tcp://host:port"),
        ("--publish-replay tcp://127.0.0.1:0", "publish_replay is about missed events; give publish, too"),
    ],
)
def test_events_that_can_not_be_published_are_one_line_and_status_2(folder, options, message):
    (folder / "wrong.toml").write_text('[publisher]\ntopics = "kv"\n')
    done = kv_pool_command("replay", "trace.gz", "--blocks", "20", *options.split(), cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
