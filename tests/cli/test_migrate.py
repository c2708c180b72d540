"""Two `kv-pool serve` processes as nodes: `migrate`, `migration-status`, `peers` and `sequences`."""

import json
import re
import signal
from contextlib import ExitStack, contextmanager

import pytest
from cli.kv_pool_command import kv_pool_command
from cli.running_commands import running, serving
from lab.made_trace import record, write_trace

from kv_pool.control import ControlClient

SIZES = ("--blocks", "2000", "--block-size", "8", "--trace-block-size", "8")
LATER_MS = 9_000_000_000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # One request generates for minutes, at about four blocks a second.
    write_trace(tmp_path / "busy.jsonl", [record(24, [1, 2, 3], 10_000, 0), record(8, [9], 1, LATER_MS)])
    write_trace(tmp_path / "idle.jsonl", [record(8, [9], 1, LATER_MS)])
    return tmp_path


@contextmanager
def node(folder, name, trace, *options):
    with serving(trace, "--name", name, *SIZES, *options, cwd=folder) as process:
        said = process.stdout.readline()
        found = re.search(r"listens at (\S+);", said)
        assert found, (process.first_line, said)
        process.address = found[1]
        yield process


@contextmanager
def two_nodes(folder, *options_of_b):
    """Yield nodes a and b; a runs requests, and b has registered at a."""
    with ExitStack() as stack:
        a = stack.enter_context(node(folder, "a", "busy.jsonl"))
        options = ("--registry", a.address, *options_of_b)
        b = stack.enter_context(node(folder, "b", "idle.jsonl", *options))
        wait_for_sequence("a")
        yield a, b


def ask(folder, *arguments):
    return kv_pool_command(*arguments, cwd=folder, XDG_RUNTIME_DIR=str(folder))


def list_ids(name):
    with ControlClient(node=name) as client:
        return [sequence.sequence_id for sequence in client.describe_sequences().sequences]


def wait_for_sequence(name, min_blocks=1):
    with ControlClient(node=name) as client:
        while True:
            for sequence in client.describe_sequences().sequences:
                if sequence.num_blocks >= min_blocks:
                    return sequence.sequence_id, sequence.num_blocks


def test_moved_sequence_continues_on_its_new_node(folder):
    with two_nodes(folder):
        sequence_id, _ = wait_for_sequence("a", min_blocks=4)
        arguments = ("--sequence-id", str(sequence_id), "--target-node", "b")
        done = ask(folder, "migrate", *arguments)
        assert done.returncode == 0, done.stderr
        pattern = rf"sequence {sequence_id} moved to node b: (\d+) blocks, .* in \d+ pieces?, \d+ ms\n"
        moved = re.fullmatch(pattern, done.stdout)
        assert moved, done.stdout
        num_moved = int(moved[1])
        assert list_ids("a") == []
        assert wait_for_sequence("b", min_blocks=num_moved + 1)[0] == sequence_id
        for name, num_used in (("a", 0), ("b", num_moved)):
            report = json.loads(ask(folder, "stats", "--node", name, "--json").stdout)
            assert report["used_blocks"] >= num_used
            assert (report["used_blocks"] == 0) == (num_used == 0)
        for name, other, direction in (("a", "b", "out"), ("b", "a", "in")):
            report = json.loads(ask(folder, "migration-status", "--node", name, "--json").stdout)
            [status] = report["migrations"]
            assert (status["peer"], status["direction"], status["phase"]) == (other, direction, "done")
            assert status["num_bytes"] == num_moved * 4096
        table = ask(folder, "migration-status", "--node", "a").stdout
        assert re.search(rf"sequence {sequence_id} +done +move to b +{num_moved}/{num_moved} ", table), table
        # And back, to a node that the target knows by name.
        assert ask(folder, "migrate", "--node", "b", *arguments[:3], "a").returncode == 0
        assert list_ids("a") == [sequence_id]


@pytest.mark.slow
def test_nodes_find_each_other_through_a_registry(folder):
    with two_nodes(folder) as (a, b):
        for name, other, address in (("a", "b", b.address), ("b", "a", a.address)):
            report = json.loads(ask(folder, "peers", "--node", name, "--json").stdout)
            [peer] = report["peers"]
            assert (peer["name"], peer["address"], peer["nearness"]) == (other, address, "host")
            assert peer["num_blocks"] == 2000
            assert peer["round_trip_ms"] > 0
        assert re.search(
            rf" b +{b.address} +same host +2,000 of 2,000 +[\d.]+ ms",
            ask(folder, "peers", "--node", "a").stdout,
        )
        b.send_signal(signal.SIGINT)
        assert b.wait(30) == 130
        assert "knows 0 other nodes" in ask(folder, "peers").stdout


def test_impossible_migration_is_one_line_and_status_2(folder):
    with node(folder, "a", "busy.jsonl", "--peer", "gone=127.0.0.1:1"):
        sequence_id, _ = wait_for_sequence("a")
        for arguments, message in (
            (f"{sequence_id} gone", "127.0.0.1:1: cannot connect"),
            (f"{sequence_id} a", "node 'a' cannot migrate to itself; name another node. It knows: gone"),
            ("7 gone", f"sequence 7 has no blocks on node a; these have: {sequence_id}"),
            ("x gone", "'x' is not a sequence id of a GPUKVPool; give a number, or newest"),
            (f"{sequence_id} gone --max-rate fast", "'fast' is not a rate; write it as 100MB/s"),
            (f"{sequence_id} gone --socket here.sock", "pass either --socket or --node, not both"),
        ):
            number, target, *more = arguments.split()
            options = ("--sequence-id", number, "--target-node", target, *more)
            done = ask(folder, "migrate", "--node", "a", *options)
            assert (done.returncode, done.stdout) == (2, ""), arguments
            (line,) = done.stderr.strip().splitlines()
            assert line.startswith("error: ")
            assert message in line
        assert list_ids("a") == [sequence_id]
        assert "gone: 127.0.0.1:1: cannot connect" in ask(folder, "peers", "--node", "a").stdout


def test_interrupted_migration_is_cancelled(folder):
    with two_nodes(folder):
        sequence_id, _ = wait_for_sequence("a", min_blocks=12)
        arguments = ["--sequence-id", str(sequence_id), "--target-node", "b", "--max-rate", "4kB/s"]
        migrating = running(folder, "migrate", "--node", "a", *arguments)
        with migrating as process, ControlClient(node="a") as client:
            while not client.describe_sequences().sequences[0].is_in_transit:
                assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert f"error: sequence {sequence_id} stays" in process.stderr.read()
            while client.describe_sequences().sequences[0].is_in_transit:
                pass
        assert list_ids("a") == [sequence_id]
        assert list_ids("b") == []
