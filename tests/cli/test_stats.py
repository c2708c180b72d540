"""`kv-pool stats`: text and JSON of a running pool."""

import json
import re

import pytest
from adapter.made_pool import make, make_scattered, take
from cli.kv_pool_command import ask_pool, kv_pool_command
from cli.running_commands import running
from events.deadlines import wait_until

from kv_pool import GPUKVPool
from kv_pool.cli.running_pool import describe_history
from kv_pool.control import ControlClient, ControlServer
from kv_pool.protocol import BlockAllocationRequest
from kv_pool.reports.allocation_monitor import AllocationMonitor, HistoryWindow, PoolHistory


@pytest.fixture
def ask(tmp_path):
    def run(pool, *options):
        return ask_pool(tmp_path, pool, "stats", *options)

    return run


def test_text_shows_counts_shares_and_latencies(ask):
    pool = make_scattered(run_length=2)
    pool.pin([3])
    lines = ask(pool).splitlines()
    assert lines[:11] == [
        "KV Pool Statistics:",
        "  Total Blocks: 10 of 4 tokens",
        "  Used Blocks: 5 (50.0%)",
        "  Free Blocks: 5 (50.0%), 0 of them cached",
        "  Pinned Blocks: 1",
        "  Reserved Blocks: 0",
        "  Sequences: 5, evicted so far: 0",
        "  Fragmentation Rate: 100.0% (runs of 2)",
        "  Largest Free Run: 1 blocks, outside of it: 80.0%",
        "  Moved Blocks: 0, epoch 0",
        "  Prefix Cache: 0 of 0 blocks hit, 0 evicted",
    ]
    latency = r"\d+\.\dµs \(avg\), \d+\.\dµs \(median\), \d+\.\dµs \(p99\)"
    longest = r"    \d+\.\dµs \(max\), 1 of {} calls timed"
    assert re.fullmatch("  Allocation Latency: " + latency, lines[11])
    assert re.fullmatch(longest.format(10), lines[12])
    assert re.fullmatch("  Free Latency: " + latency, lines[13])
    assert re.fullmatch(longest.format(1), lines[14])
    assert len(lines) == 15


def test_new_pool_has_no_latencies(ask):
    assert "Allocation Latency: not known yet, 0 calls" in ask(make())


def test_hits_are_shown_as_a_share(ask):
    pool = make()
    take(pool, 1, 2)
    pool.cache_prefix(1, [b"a", b"b"])
    pool.claim_prefix(2, [b"a", b"b", b"c", b"d"])
    assert "Prefix Cache: 2 of 4 blocks hit (50.0%), 0 evicted" in ask(pool)


def test_json_is_one_object(ask):
    pool = make_scattered(run_length=2)
    report = json.loads(ask(pool, "--json"))
    assert (report["used_blocks"], report["free_blocks"], report["utilization"]) == (5, 5, 0.5)
    assert (report["fragmentation_rate"], report["run_length"]) == (1.0, 2)
    assert report["allocation"]["num_calls"] == 10


@pytest.mark.parametrize("command", ["stats", "defrag", "stats --json"])
def test_without_a_pool_the_error_says_how_to_start_one(tmp_path, command):
    done = kv_pool_command(*command.split(), "--socket", "here.sock", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: no pool is served at here.sock: there is no such socket. Start one with kv-pool serve, or "
        "name another socket with --socket.\n"
    )


@pytest.mark.parametrize("command", ["stats", "stats --watch"])
def test_folder_or_file_as_socket_is_named_in_the_error(tmp_path, command):
    (tmp_path / "file").write_text("")
    for name, kind in ((".", "folder"), ("file", "file")):
        done = kv_pool_command(*command.split(), "--socket", name, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"error: no pool is served at {name}: this is a {kind}, not a socket." in done.stderr


def test_watch_repeats_the_output(tmp_path):
    options = ("--watch", "--json", "--socket", "here.sock")
    with ControlServer(make(), tmp_path / "here.sock"), running(tmp_path, "stats", *options) as watching:
        looks = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.terminate()
        assert watching.wait(30) == 143
    assert {look["total_blocks"] for look in looks} == {looks[0]["total_blocks"]}


def test_a_live_curve_is_described_in_sentences(ask):
    pool = GPUKVPool(200, 4, live_curve=True)
    for number in range(4000):
        hashes = [b"%d" % (number % 300), b"%d next" % (number % 300)]
        hits = pool.claim_prefix(number, hashes)
        pool.allocate(BlockAllocationRequest(2 - len(hits), number))
        pool.cache_prefix(number, hashes)
        pool.free_sequence(number)
        if number == 20:
            assert "Live Curve: not known yet, " in ask(pool)
    for number in range(10_000, 10_500):
        pool.claim_prefix(number, hashes)
        pool.free_sequence(number)
    lines = ask(pool).splitlines()
    place = next(index for index, line in enumerate(lines) if "Live Curve" in line)
    assert re.fullmatch(
        r"  Live Curve: 20% more blocks would give \d+\.\d points more \(± \d+\.\d\)", lines[place]
    )
    assert re.fullmatch(
        r"    20% fewer blocks would give \d+\.\d points fewer \(± \d+\.\d\)", lines[place + 1]
    )
    assert re.match(
        r"    hits of blocks: \d+\.\d% measured, \d+\.\d% \(± \d+\.\d\) by the sample", lines[place + 2]
    )
    assert re.match(r"    look-ups count half after 6,400 others, [\d,]+ s at this rate", lines[place + 3])
    assert max(map(len, lines[place : place + 4])) <= 80
    known = json.loads(ask(pool, "--json"))["live_curve"]
    assert known["capacity"] == 200
    assert [point["multiple"] for point in known["points"]][:2] == [0.5, 0.6]


def test_history_has_the_use_and_rates_of_1_5_and_15_minutes(tmp_path):
    pool = make()
    take(pool, 1, 2)
    pool.cache_prefix(1, [b"a", b"b"])
    with ControlServer(pool, tmp_path / "here.sock"):
        with ControlClient(tmp_path / "here.sock") as client:
            wait_until(lambda: client.get_history().windows[0].covered_s, "the first state")
            pool.claim_prefix(2, [b"a", b"b", b"c", b"d"])
            for window in client.get_history().windows:
                assert window.rates["hit_tokens"] * window.covered_s == pytest.approx(8)
            take(pool, 3, 6)
            # 0.2 at first, and 0.8 now; the mean is higher when the server has noted a second state.
            wait_until(lambda: client.get_history().windows[0].utilization > 0.51, "the second state")
        options = ("stats", "--history", "--socket", "here.sock")
        text = kv_pool_command(*options, cwd=tmp_path, COLUMNS="80").stdout
        found = json.loads(kv_pool_command(*options, "--json", cwd=tmp_path).stdout)
    rows = [re.split(r"  +", line) for line in text.splitlines()]
    assert rows[0] == ["KV Pool History", "1 min", "5 min", "15 min"]
    assert ["Hit Rate", "50.0%", "50.0%", "50.0%"] in rows
    assert all(len(line) <= 80 for line in text.splitlines())
    assert [window["window_s"] for window in found["windows"]] == [60, 300, 900]
    assert found["states"][-1]["counters"]["hit_tokens"] == 8


def test_long_numbers_of_a_history_stay_apart():
    """Rates of ten million tokens per second and more used to have no space between them."""
    state = AllocationMonitor(make()).log_allocation_state()
    window = HistoryWindow(
        window_s=60,
        covered_s=60.0,
        utilization=0.5,
        peak_utilization=0.5,
        rates=dict.fromkeys(state.counters, 2.5e7),
    )
    lines = describe_history(PoolHistory(states=[state], windows=[window] * 3, scenarios={}))
    assert [line.split()[-3:] for line in lines[-2:]] == [["25,000,000.0"] * 3] * 2
