"""`kv-pool serve`: its first line, replies, events and clean end."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import zmq.auth
from adapter.made_pool import make
from cli.kv_pool_command import kv_pool_command
from cli.running_commands import serving
from lab.made_trace import record, write_trace

from kv_pool.cli.publishing import open_publisher
from kv_pool.control import ControlClient, ControlServer
from kv_pool.events.event_publisher import PublisherConfig
from kv_pool.events.mirror import PrefixMirror, apply_item
from kv_pool.events.stream_items import ReceivedBatch
from kv_pool.events.subscriber import KVEventSubscriber
from kv_pool.reports import BlockState

SMALL = ("trace.jsonl", "--blocks", "40", "--block-size", "8", "--trace-block-size", "8")


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", [record(24, [1, 2, 3], 5, 0), record(16, [1, 4], 50, 10)])
    return tmp_path


def test_first_line_names_the_socket_and_a_command(folder):
    with serving(*SMALL, cwd=folder) as process:
        assert process.first_line == (
            f"a pool of 40 blocks of 8 tokens is served at {folder}/kv_pool/control.sock; "
            "in a second terminal: kv-pool stats\n"
        )
        with ControlClient(folder / "kv_pool" / "control.sock") as client:
            assert client.get_statistics().total_blocks == 40


def test_manager_is_served_like_a_pool(folder):
    with serving(*SMALL, "--manager", "--socket", "here.sock", cwd=folder):
        for command in ("stats", "layout", "sequences", "defrag"):
            done = kv_pool_command(command, "--json", "--socket", "here.sock", cwd=folder)
            assert done.returncode == 0, done.stderr
            known = json.loads(done.stdout)
            assert known.get("total_blocks", 40) == 40
            # Only sequences of a GPUKVPool have priorities.
            assert all(one["priority"] is None for one in known.get("sequences", []))


def test_first_line_names_another_socket(folder):
    with serving(*SMALL, "--socket", "here.sock", cwd=folder) as process:
        assert process.first_line.endswith("kv-pool stats --socket here.sock\n")
        done = kv_pool_command("stats", "--socket", "here.sock", "--json", cwd=folder)
        assert json.loads(done.stdout)["block_size"] == 8


def test_mirror_of_the_events_equals_the_cached_blocks(folder):
    # The second hits a block of the first; the third arrives after the test.
    records = [record(24, [1, 2, 3], 5, 0), record(16, [1, 4], 10, 1000), record(8, [9], 1, 9_000_000)]
    write_trace(folder / "trace.jsonl", records)
    publishing = ("--publish", "tcp://127.0.0.1:0", "--publish-replay", "tcp://127.0.0.1:0")
    mirror = PrefixMirror(learns_tokens=True)
    mirror.add_publisher("serve")
    with serving(*SMALL, *publishing, cwd=folder) as process:
        endpoints = re.search(r", or: kv-pool events (\S+) --replay (\S+)\n$", process.first_line).groups()
        with (
            KVEventSubscriber(*endpoints) as subscriber,
            ControlClient(folder / "kv_pool" / "control.sock") as client,
        ):
            # Three blocks each, one of which they share.
            while mirror.count_blocks("serve") < 5 or client.get_statistics().num_sequences:
                for item in subscriber.poll(0.05):
                    apply_item(mirror, item, "serve")
            layout = client.get_layout()
    assert layout.states.count(BlockState.CACHED) == mirror.count_blocks("serve") == 5
    assert mirror.find_prefix_of_tokens([1] * 8 + [2] * 8 + [7] * 8) == {"serve": 16}


def test_publisher_uses_the_preset_for_routers():
    """Sequence numbers from the clock, a heartbeat, replay and a state; restarts used to go unnoticed."""
    port = "tcp://127.0.0.1:0"
    with open_publisher(port, port, None) as publisher:
        assert publisher.config == PublisherConfig.for_routers(endpoint=port, replay_endpoint=port)
        numbers = []
        with KVEventSubscriber(publisher.endpoint, publisher.replay_endpoint) as subscriber:
            while len(numbers) < 2:  # heartbeats
                numbers += [item.sequence for item in subscriber.poll(0.2) if isinstance(item, ReceivedBatch)]
    assert abs(numbers[0] / 1e6 - time.time()) < 100
    assert publisher.get_statistics().num_empty_batches_sent > 0


@pytest.mark.parametrize("is_named_in_its_file", [False, True])
def test_publisher_is_configured_by_a_file(folder, is_named_in_its_file):
    """An encrypted stream with heartbeats; the printed command can read it."""
    for name in ("server", "reader"):
        zmq.auth.create_certificates(folder, name)
    (folder / "readers").mkdir()
    (folder / "reader.key").rename(folder / "readers" / "reader.key")
    (folder / "publisher.toml").write_text(
        """
        [publisher]
        endpoint = "tcp://127.0.0.1:5557"        # overridden by the command line
        replay_endpoint = "tcp://127.0.0.1:0"
        topic = "kv@pod@model"
        heartbeat_s = 0.05
        curve_secret_key_file = "server.key_secret"
        curve_client_keys_dir = "readers"
        """
    )
    options = ["--publish-config", "publisher.toml"]
    if is_named_in_its_file:
        (folder / "serve.toml").write_text('publish_config = "publisher.toml"')
        options = ["--config", "serve.toml"]
    with serving(*SMALL, "--publish", "tcp://127.0.0.1:0", *options, cwd=folder) as process:
        command = process.first_line.partition(", or: kv-pool ")[2].split()
        assert command[-4:] == ["--curve-server-key", "server.key", "--curve-secret-key", "YOURS.key_secret"]
        assert "tcp://127.0.0.1:5557" not in command
        command[-1] = "reader.key_secret"
        reads = kv_pool_command(*command, "--topic", "kv@", "--json", "--limit", "2", cwd=folder)
        beats = kv_pool_command(*command, "--mirror", "--limit", "9", cwd=folder)
    assert reads.returncode == 0, reads.stderr
    assert {json.loads(line)["kind"] for line in reads.stdout.splitlines()} == {"stored"}
    assert beats.returncode == 0, beats.stderr
    # After the last request only heartbeats arrive.
    assert re.search(r"\d in group 0 GPU", beats.stdout), beats.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_it_cleanly(folder, number):
    with serving(*SMALL, "--socket", "here.sock", cwd=folder) as process:
        assert (folder / "here.sock").exists()
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert process.stderr.read() == ""
        assert not (folder / "here.sock").exists()


def test_it_ends_by_itself_after_its_duration(folder):
    with serving(*SMALL, "--socket", "here.sock", "--duration", "0.1", cwd=folder) as process:
        assert process.wait(30) == 0
        assert not (folder / "here.sock").exists()


def test_the_bundled_trace_is_the_default(tmp_path):
    with serving("--speedup", "20", "--socket", "here.sock", cwd=tmp_path) as process:
        assert "a pool of 10,000 blocks of 128 tokens" in process.first_line
        with ControlClient(tmp_path / "here.sock") as client:
            while not client.get_statistics().num_sequences:
                pass
            assert client.get_layout().num_blocks == 10_000
            assert client.defragment(max_moves=5).moved_blocks <= 5


def test_command_line_overrides_options_of_a_file(folder):
    (folder / "serve.toml").write_text(
        'trace = "trace.jsonl"\ntrace_block_size = 8\nblocks = 30\nblock_size = 4\nsocket = "here.sock"\n'
    )
    with serving("--config", "serve.toml", "--blocks", "50", cwd=folder):
        with ControlClient(folder / "here.sock") as client:
            statistics = client.get_statistics()
        assert (statistics.total_blocks, statistics.block_size) == (50, 4)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [((), 0, ""), (("--publish", "tcp://127.0.0.1:0"), 2, "needs pyzmq: pip install '.[zmq]'")],
)
def test_pyzmq_is_required_only_for_events(folder, options, status, message):
    arguments = ["kv-pool", "serve", *SMALL, "--socket", "here.sock", "--duration", "0.1", *options]
    code = (
        f"import sys; sys.modules['zmq'] = None; sys.argv = {arguments!r}\n"
        "from kv_pool.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status
    assert message in done.stderr


def test_socket_in_use_is_one_line_and_status_2(folder):
    with ControlServer(make(), folder / "here.sock"):
        done = kv_pool_command("serve", *SMALL, "--socket", "here.sock", cwd=folder)
    assert done.returncode == 2
    assert "a pool is served at here.sock already" in done.stderr


def test_later_broken_line_ends_it_with_status_2(folder):
    write_trace(folder / "trace.jsonl", [*[record(8, [at]) for at in range(1001)], "not json"])
    with serving(*SMALL, "--socket", "here.sock", cwd=folder) as process:
        assert process.wait(60) == 2
        assert "trace.jsonl:1002: " in process.stderr.read()
        assert not (folder / "here.sock").exists()
