"""`kv-pool events` as a user runs it, with a publisher in this process."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys

import pytest
import zmq.auth
from cli.kv_pool_command import kv_pool_command
from cli.running_commands import running
from rich.console import Console

from kv_pool import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.cli.console import print_parts
from kv_pool.cli.events import LineFilter, MirrorTable, make_lines
from kv_pool.events.batch import DecodedBatch
from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.events.publisher import ZMQEventPublisher
from kv_pool.events.stream_items import (
    BatchesLost,
    PublisherRestarted,
    PublisherSilent,
    ReceivedBatch,
    StreamSource,
)
from kv_pool.events.stream_state import StreamState
from kv_pool.events.subscriber import KVEventSubscriber

STORED = BlockStored([255, 1], 7, list(range(8)), 4, None, "GPU", "sql", group_idx=1)
REMOVED = BlockRemoved([b"\0" * 31 + b"\2"], "CPU")


@pytest.fixture
def publisher():
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with ZMQEventPublisher(config, StreamState()) as publisher:
        yield publisher


def texts(item, **chosen):
    return [line.text for line in make_lines(item, LineFilter(**chosen))]


def batch(*events):
    return ReceivedBatch(12, DecodedBatch(1.5, list(events), 0))


def test_line_describes_its_event():
    assert texts(batch(STORED, REMOVED, AllBlocksCleared())) == [
        "      12 stored      2 blocks 00000000000000ff  after 0000000000000007  "
        "tokens 0 1 2 3 4 5 … (8)  adapter sql  group 1 GPU",
        "      12 removed     1 block  0000000000000002  group 0 CPU",
        "      12 cleared ",
    ]
    assert texts(BatchesLost(3, 5)) == ["       3 lost     to 5, 3 batches, for good"]
    assert texts(BatchesLost(3, 5, True)) == ["       3 lost     to 5, 3 batches, a snapshot follows"]
    assert texts(PublisherRestarted()) == ["         restarted"]
    assert texts(PublisherSilent(2.04)) == ["         silent   for 2.0 s"]


@pytest.mark.parametrize(("is_healed", "style"), [(True, "yellow"), (False, "bold white on red")])
def test_only_a_loss_for_good_is_red(is_healed, style):
    (line,) = make_lines(BatchesLost(3, 5, is_healed), LineFilter())
    assert line.style == style


@pytest.mark.parametrize(
    ("chosen", "kinds"),
    [
        ({}, ["stored", "removed", "cleared"]),
        ({"kind": "removed"}, ["removed"]),
        ({"group": 1}, ["stored", "cleared"]),
        ({"medium": "cpu"}, ["removed", "cleared"]),
        ({"kind": "stored", "group": 0}, []),
    ],
)
def test_filter_selects_lines(chosen, kinds):
    lines = make_lines(batch(STORED, REMOVED, AllBlocksCleared()), LineFilter(**chosen))
    assert [line.kind for line in lines] == kinds


def test_the_stream_is_printed_as_json(publisher, tmp_path):
    publisher.publish([STORED, REMOVED])
    publisher.publish([AllBlocksCleared()])
    places = [publisher.endpoint, "--replay", publisher.replay_endpoint]
    done = kv_pool_command("events", *places, "--json", "--limit", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["kind"] == "stored"
    assert (first["sequence"], first["block_hashes"], first["parent_block_hash"]) == (0, [255, 1], 7)
    assert (second["kind"], second["block_hashes"]) == ("removed", [2])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_narrow_terminal_shows_every_column_of_the_mirror(width):
    """It used to show the first ones, without `lost`, which the guide says to watch."""
    endpoint = "tcp://10.0.0.1:5557"
    with KVEventSubscriber("ipc://nowhere") as subscriber:
        table = MirrorTable({endpoint: subscriber}, None, LineFilter(), True)
        table._mirror.apply(endpoint, [BlockStored([*range(1234)], None, [], 4, None, "GPU", None)])
        console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
        table._console = console
        print_parts(table.lay_out(), console)
    printed = console.file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    words = ("1,234", "group", "GPU", "not", "connected", "batches", "lost", "snapshots", "restarts")
    assert all(word in printed for word in words)
    assert printed.count(endpoint) == printed.count("┏")
    assert "lost" in printed.split("┏")[1], "it was below the screen if there are many publishers"
    assert "…" not in printed


def test_mirror_shows_each_publisher_of_a_bound_endpoint():
    endpoint = "tcp://10.0.0.1:5557"
    with KVEventSubscriber("ipc://nowhere") as subscriber:
        table = MirrorTable({endpoint: subscriber}, None, LineFilter(), True)
        for number, source in enumerate([StreamSource("kv@a", 0), StreamSource("kv@b", 1)], 1):
            store = BlockStored([*range(number)], None, [], 4, None, "GPU", None)
            table.take(endpoint, ReceivedBatch(0, DecodedBatch(1.0, [store], 0), source=source))
            console = Console(file=io.StringIO(), width=200)
            print_parts(table.lay_out(), console)
    rows = [line.split("│")[1:7] for line in console.file.getvalue().splitlines() if "in group" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [f"{endpoint} kv@a rank 0", "not connected", "0", "1 in group 0 GPU", "1", "1"],
        [f"{endpoint} kv@b rank 1", "not connected", "0", "2 in group 0 GPU", "1", "2"],
    ]


@pytest.mark.parametrize("replay", [None, "ipc://nowhere-replay"])
def test_mirror_says_that_a_publisher_is_not_connected(replay):
    """With a replay endpoint the table used to show the unanswered request instead."""
    with KVEventSubscriber("ipc://nowhere", replay) as subscriber:
        table = MirrorTable({"ipc://nowhere": subscriber}, None, LineFilter(), True)
        console = Console(file=io.StringIO(), width=200)
        print_parts(table.lay_out(), console)
        assert subscriber.get_statistics().is_recovering == (replay is not None)
    assert "│ not connected │" in console.file.getvalue()


@pytest.mark.parametrize(("options", "num_held"), [([], 2), (["--no-count-copies"], 1)])
def test_mirror_counts_copies_unless_disabled(tmp_path, options, num_held):
    """A publisher without a state announces each copy; the table used to show too few blocks."""
    config = PublisherConfig(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    with ZMQEventPublisher(config) as publisher:
        stores = [BlockStored([1, 2], None, [], 4, None, "GPU", None)] * 2
        publisher.publish([*stores, BlockRemoved([1], "GPU")])
        places = [publisher.endpoint, "--replay", publisher.replay_endpoint]
        done = kv_pool_command("events", *places, "--mirror", "--limit", "1", *options, cwd=tmp_path)
    assert f"{num_held} in group 0 GPU" in done.stdout, done.stderr


HOSTILE = "[/x][red]\x1b]0;title\x07\x9b2J\u202e"


@pytest.mark.parametrize("options", [[], ["--mirror"], ["--json"]])
def test_strings_of_the_stream_are_escaped(publisher, tmp_path, options):
    """A medium of `[/x]` used to end `--mirror` with a traceback, and escape sequences to be executed."""
    publisher.publish([BlockStored([1], None, [], 4, None, HOSTILE, HOSTILE)])
    places = [publisher.endpoint, "--replay", publisher.replay_endpoint]
    done = kv_pool_command("events", *places, *options, "--limit", "1", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.isprintable() for line in done.stdout.splitlines())
    if options == ["--json"]:
        assert json.loads(done.stdout)["medium"] == HOSTILE
    else:
        assert r"[/X][RED]\x1b]0;TITLE\x07\x9b2J\u202e" in done.stdout


@pytest.mark.parametrize("options", [[], ["--curve-secret-key", "reader.key_secret"]])
def test_encrypted_stream_is_printed_with_keys(tmp_path, options):
    """With only the publisher's public key if all subscribers are admitted, or also with own keys."""
    for name in ("server", "reader"):
        zmq.auth.create_certificates(tmp_path, name)
    config = PublisherConfig(
        endpoint="tcp://127.0.0.1:0",
        replay_endpoint="tcp://127.0.0.1:0",
        curve_secret_key_file=str(tmp_path / "server.key_secret"),
        curve_client_keys_dir=str(tmp_path) if options else None,
    )
    with ZMQEventPublisher(config) as publisher:
        publisher.publish([STORED])
        places = [publisher.endpoint, "--replay", publisher.replay_endpoint]
        keys = ["--curve-server-key", "server.key", *options]
        done = kv_pool_command("events", *places, *keys, "--limit", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("       0 stored ")


def test_connecting_publisher_is_read_with_bind(tmp_path):
    config = PublisherConfig(endpoint=f"ipc://{tmp_path}/here", bind=False, heartbeat_s=0.05)
    options = ("--bind", "--mirror", "--limit", "2")
    with running(tmp_path, "events", config.endpoint, *options) as process, ZMQEventPublisher(config):
        shown, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "following" in shown


def test_ctrl_c_ends_it_silently(publisher, tmp_path):
    publisher.publish([STORED])
    places = (publisher.endpoint, "--replay", publisher.replay_endpoint)
    with running(tmp_path, "events", *places) as process:
        assert "stored" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, complaints = process.communicate(timeout=20)
    assert (process.returncode, rest, complaints) == (130, "", "")


@pytest.mark.parametrize("options", [[], ["--mirror"]])
def test_terminal_output_has_colours_and_rates(publisher, options):
    publisher.publish([STORED])
    near, far = pty.openpty()
    command = [sys.executable, "-P", "-m", "kv_pool.cli.main", "events", publisher.endpoint, *options]
    process = subprocess.Popen(
        [*command, "--replay", publisher.replay_endpoint],
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200", "PYTHONIOENCODING": "utf-8"},
        stdout=far,
        stderr=subprocess.PIPE,
    )
    os.close(far)
    awaited = [b"2 in group 1 GPU"] if options else [b"\x1b[32m", b"batches", b"/s"]
    shown = b""
    with process:
        while not all(text in shown for text in awaited):
            assert select.select([near], [], [], 20)[0], shown
            shown += os.read(near, 65536)
        process.send_signal(signal.SIGINT)
        # Keep reading, or the command blocks on the terminal, whose end is an error on Linux.
        with contextlib.suppress(OSError):
            while os.read(near, 65536):
                pass
        assert process.wait(20) == 130
        assert process.stderr.read() == b""
    os.close(near)
