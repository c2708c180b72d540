"""`kv-pool replay`: the table, the file, and the options for capacity."""

import hashlib
import json
import re
import shutil
import signal
import socket
import subprocess
import urllib.request
from itertools import islice

import pytest
from cli.kv_pool_command import kv_pool_command, list_rows
from cli.running_commands import BOUND_S, running
from lab.compare.made_comparison import MINE
from lab.made_trace import record, write_trace

from kv_pool import BlockStored, __version__
from kv_pool.events.stream_items import ReceivedBatch
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
    """Return the first two columns of the table."""
    return {name: value for name, value, *_ in list_rows(stdout)}


def test_table_and_files_agree_and_say_how_to_repeat_the_run(folder):
    stdout, report = replay(folder, "--blocks", "20", "--csv", "report.csv", "--seed", "7")
    names, values = (line.split(",") for line in (folder / "report.csv").read_text().splitlines())
    assert dict(zip(names, values, strict=True))["tokens_hit"] == "16"
    assert "trace.gz through 20 blocks of 8 tokens" in stdout
    table = rows(stdout)
    assert table["requests"] == "3"
    assert table["refused"] == "0"
    assert table["token hit rate"] == "22.22%"
    assert table["block hit rate"] == "22.22%"
    assert (report["requests"], report["refused_requests"]) == (3, 0)
    assert (report["tokens_hit"], report["tokens_in"]) == (16, 72)
    assert (report["blocks_hit"], report["blocks_looked_up"]) == (2, 9)
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
    # at 40 it needs a third and loses them; from 74 to 82 it recomputes 8 tokens.
    assert report["preempted"] == 1
    assert report["simulated_ms"] == 82 + 90
    assert report["tokens_out"] == 14
    assert report["convention"] == "ids_as_blocks_cap"
    assert report["settings"]["speedup"] == 2.0


TWICE = [record(24, [1, 2, 3]), record(32, [4, 5, 6, 7], 0, 100), record(24, [1, 2, 3], 0, 200)]


def test_evicted_blocks_are_onboarded_from_tiers(folder):
    # The second takes 3 and 2 from the first, tail first; the host tier holds one block, so 3 goes to disk.
    write_trace(folder / "trace.gz", TWICE)
    stdout, report = replay(folder, "--blocks", "5", "--host-tier", "1", "--disk-tier", "9")
    table = rows(stdout)
    assert (table["token hit rate"], table["from GPU"], table["from CPU"]) == ("20.00%", "10.00%", "10.00%")
    assert table["from STORAGE"] == "0.00%"
    assert (table["CPU tier"], table["STORAGE tier"]) == ("1", str(report["tiers"][1]["blocks_held"]))
    assert [tier["medium"] for tier in report["tiers"]] == ["CPU", "STORAGE"]
    assert [tier["tokens_hit"] for tier in report["tiers"]] == [8, 0]
    assert report["tiers"][0]["blocks_read"] == 1
    assert report["tiers"][0]["bytes_moved"] == 0


def test_skipped_broken_lines_are_shown(folder):
    write_trace(folder / "trace.gz", [TRACE[0], "not json", TRACE[1], "{}"])
    stdout, report = replay(folder, "--blocks", "20", "--skip-broken")
    assert rows(stdout)["broken lines"] == "2"
    assert "trace.gz:2: " in stdout
    assert (report["requests"], report["broken_lines"]) == (2, 2)


def test_its_events_can_be_read_while_it_runs(folder):
    write_trace(folder / "long.jsonl", [record(8, [number]) for number in range(100_000)])
    options = "--blocks 20 --trace-block-size 8 --pace 20"
    endpoints = "--publish tcp://127.0.0.1:0 --publish-replay tcp://127.0.0.1:0"
    with running(folder, "replay", "long.jsonl", *options.split(), *endpoints.split()) as process:
        line = process.stdout.readline()
        output = re.fullmatch(r"in a second terminal: kv-pool events (\S+) --replay (\S+)\n", line)
        with KVEventSubscriber(*output.groups()) as subscriber:
            batches = list(islice((item for item in subscriber if isinstance(item, ReceivedBatch)), 4))
    first = batches[0].sequence
    assert [item.sequence for item in batches] == [first, first + 1, first + 2, first + 3]
    events = [event for item in batches for event in item.batch.events]
    stored = sorted(event.token_ids for event in events if isinstance(event, BlockStored))
    assert stored == [[stored[0][0] + number] * 8 for number in range(len(stored))]


def test_publisher_is_configured_by_a_file(folder):
    (folder / "publisher.toml").write_text(
        '[publisher]\nendpoint = "tcp://127.0.0.1:0"\nreplay_endpoint = "tcp://127.0.0.1:0"\n'
    )
    options = "--blocks 20 --publish-config publisher.toml --pace 1000"
    done = kv_pool_command("replay", "trace.gz", *options.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert re.match(r"in a second terminal: kv-pool events tcp://\S+ --replay tcp://\S+\n", done.stdout)


def test_one_line_per_request_is_written_on_demand(folder):
    done = kv_pool_command("replay", "trace.gz", "--blocks", "20", "--requests", "requests.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == int(rows(done.stdout)["requests"].replace(",", ""))
    assert {line["outcome"] for line in lines} <= {"done", "refused"}


def test_breakdowns_are_shown_written_and_drawn(folder):
    lines = [{**line, "session_id": line["hash_ids"][0], "tenant": "t"} for line in TRACE]
    write_trace(folder / "trace.gz", lines)
    stdout, report = replay(folder, "--blocks", "20", "--by", "turn,tenant", "--png", "turns.png")
    assert "hit rate by turn" in stdout
    assert "picture: turns.png" in stdout
    assert (folder / "turns.png").read_bytes()[:4] == b"\x89PNG"
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stdout.splitlines()]
    assert ["1", "2", "40", "0.00%", "0.00%", ""] in table
    assert ["2", "1", "32", "50.00%", "50.00%", "████████"] in table
    assert ["t", "3", "72", "22.22%", "22.22%", "████"] in table
    assert [row["key"] for row in report["breakdowns"]["turn"]] == [1, 2]
    assert report["settings"]["by"] == "turn,tenant"


def test_long_breakdowns_are_cut_in_the_table_only(folder):
    write_trace(folder / "trace.gz", [record(8, [number], session_id=number) for number in range(25)])
    stdout, report = replay(folder, "--blocks", "50", "--by", "session")
    assert "5 more rows in the file of --json" in stdout
    assert len(report["breakdowns"]["session"]) == 25


def test_a_broken_policy_ends_a_replay_without_a_log(folder):
    """The log of the pool said that it goes on with LRU, above the error of the replay that ends."""
    (folder / "mine.py").write_text(MINE)
    options = ("--trace-block-size", "8", "--blocks", "4", "--policy", "mine.py:Broken")
    done = kv_pool_command("replay", "trace.gz", *options, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the cache policy mine.py:Broken is broken: ")
    assert "goes on with LRU" not in done.stderr


def read_metrics(text):
    """Return the samples of metrics in Prometheus' format by name, without labels."""
    families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool on PATH")
def test_metrics_in_a_file_are_those_of_the_report(folder):
    _, report = replay(folder, "--blocks", "20", "--metrics", "metrics.prom", "--model", "llama-3-8b")
    text = (folder / "metrics.prom").read_text()
    found = read_metrics(text)
    assert found["kv_pool_hit_tokens_total"] == report["tokens_hit"] == 16
    assert found["kv_pool_looked_up_tokens_total"] == report["blocks_looked_up"] * 8
    assert 'model_name="llama-3-8b"' in text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_metrics_are_scraped_while_the_replay_runs(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, n]) for n in range(3, 600)])
    options = (
        "replay trace.jsonl --trace-block-size 8 --blocks 20 --publish ipc://events --pace 100 --metrics 0"
    )
    with running(tmp_path, *options.split()) as process:
        process.stdout.readline()  # of the events
        url = process.stdout.readline().removeprefix("metrics: ").strip()
        scraped = []
        while len(scraped) < 3:
            with urllib.request.urlopen(url, timeout=30) as answer:
                found = read_metrics(answer.read().decode())
            if found.get("kv_pool_hit_tokens_total", 0) > (scraped[-1] if scraped else 0):
                scraped.append(found["kv_pool_hit_tokens_total"])
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 128 + signal.SIGTERM
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)


def test_a_scrape_does_not_wait_for_the_pace_of_a_replay(tmp_path):
    """It used to wait for the lock that the replay held until its next request."""
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, n]) for n in range(3, 9)])
    options = (
        "replay trace.jsonl --trace-block-size 8 --blocks 20 --publish ipc://events --pace 0.05 --metrics 0"
    )
    with running(tmp_path, *options.split()) as process:
        process.stdout.readline()  # of the events
        url = process.stdout.readline().removeprefix("metrics: ").strip()
        for _ in range(3):
            with urllib.request.urlopen(url, timeout=5) as answer:
                assert answer.status == 200
        process.terminate()
        assert process.wait(BOUND_S) == 128 + signal.SIGTERM


def test_a_digit_that_is_no_decimal_is_a_file_name(folder):
    """It used to end in a traceback: "²".isdigit() is true."""
    replay(folder, "--blocks", "20", "--metrics", "²")
    assert read_metrics((folder / "²").read_text())["kv_pool_hit_tokens_total"] == 16


def test_a_port_in_use_is_refused(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = kv_pool_command(
            "replay", "trace.gz", "--trace-block-size", "8", "--blocks", "20", "--metrics", port, cwd=folder
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --metrics: cannot serve at port {port}: ")
