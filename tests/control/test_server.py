"""A real server on a real socket: replies, access, failures."""

import errno
import fcntl
import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from adapter.made_pool import check, draw, make, make_scattered, make_storage, take
from control.raw_client import STATS, RawClient
from made_threads import no_new_threads
from migration.made_channels import LONG, beside

from kv_pool import ControlError, CopyFailedError
from kv_pool.control import ControlClient, ControlServer
from kv_pool.control.socket_path import lock_socket
from kv_pool.errors import OutOfThreadsError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.sock"


def is_stats(reply):
    status, content = reply
    return status == 200 and content["total_blocks"] == 10


# ---- replies -----------------------------------------------------------------------------------------


def test_statistics_over_the_socket_equal_the_pools(path):
    pool = make()
    take(pool, 1, 3)
    with ControlServer(pool, path), ControlClient(path) as client:
        output = client.get_statistics()
        assert output.used_blocks == 3
        assert output == pool.get_statistics()


def test_readings_and_views_do_not_need_the_guard(path):
    pool = make()
    take(pool, 1, 3)
    guard = threading.Lock()
    with ControlServer(pool, path, guard=guard), ControlClient(path, timeout_s=5) as client, guard:
        assert client.read().used_blocks == 3
        view = client.view(num_cells=2, num_sequences=1)
    assert view.reading.used_blocks == 3
    assert [list(msgspec.structs.astuple(cell)) for cell in view.map.cells] == [[2, 0, 3, 0], [5, 0, 0, 0]]
    assert [one.num_blocks for one in view.sequences] == [3]
    assert (view.prefixes, view.migrations) == ([], None)


def test_readings_do_not_wait_for_a_command_that_waits_for_the_guard(path):
    """The page, `kv-pool top` and the history used to stop for as long."""
    guard = threading.Lock()
    server = ControlServer(make(), path, guard=guard)
    with server, ControlClient(path, timeout_s=5) as client, RawClient(path) as waiting, guard:
        waiting.send(STATS)
        for _ in range(5):
            assert client.read().total_blocks == client.view().reading.total_blocks == 10
            assert client.get_history().windows


def test_the_guard_is_held_during_a_command(path):
    guard = threading.Lock()
    seen = []
    pool = make_scattered(on_moved=lambda relocation: seen.append(guard.locked()))
    with ControlServer(pool, path, guard=guard), ControlClient(path) as client:
        client.defragment()
    assert seen
    assert all(seen)
    assert not guard.locked()


def test_one_connection_carries_several_commands(path):
    with ControlServer(make(), path), RawClient(path) as client:
        assert all(is_stats(client.ask(STATS)) for _ in range(3))
        client.send(STATS + STATS)
        assert is_stats(client.read())
        assert is_stats(client.read())


def test_server_without_a_thread_leaves_no_socket(path):
    server = ControlServer(make(), path)
    with no_new_threads(), pytest.raises(OutOfThreadsError):
        server.start()
    assert list(path.parent.iterdir()) == []
    with server, ControlClient(path) as client:
        assert client.get_statistics().total_blocks == 10


def start_without_handles(path):
    """Start a server in a child without free file descriptors; print the outcome."""
    server = ControlServer(make(), path)
    last = os.open("/dev/null", os.O_RDONLY)
    os.close(last)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 3, before[1]))
    try:
        server.start()
    except ControlError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with server, ControlClient(path) as client:
        print(client.get_statistics().total_blocks)


def test_server_without_a_file_descriptor_is_an_error(path):
    """`start` used to return as if it had succeeded, and the server did not reply."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from control.test_server import start_without_handles\nstart_without_handles(sys.argv[2])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent.parent), str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, second = output.stdout.splitlines()
    assert "cannot serve there" in first
    assert os.strerror(errno.EMFILE) in first
    assert second == "10"


def test_server_without_its_extra_names_the_command_that_installs_it(path):
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from kv_pool import GPUKVPool\nfrom kv_pool.control import ControlServer\n"
        "from kv_pool.errors import MissingDependencyError\n"
        "try: ControlServer(GPUKVPool(10, 16), sys.argv[1]).start()\n"
        "except MissingDependencyError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert "serving a pool needs starlette and uvicorn: pip install '.[serve]'" in done.stdout
    assert not path.exists()


# ---- access ------------------------------------------------------------------------------------------


def test_the_socket_is_open_to_its_owner_only(tmp_path):
    path = tmp_path / "new" / "c.sock"
    before = os.umask(0)
    try:
        with ControlServer(make(), path):
            assert stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_stopping_removes_the_socket(path):
    with ControlServer(make(), path):
        pass
    assert list(path.parent.iterdir()) == []


def test_socket_of_a_running_server_is_not_replaced(path):
    with ControlServer(make(), path):
        with pytest.raises(ControlError, match=r"is served at .* already"):
            ControlServer(make(20), path).start()
        with ControlClient(path) as client:
            assert client.get_statistics().total_blocks == 10


def test_dead_socket_is_replaced(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert path.exists()
    with ControlServer(make(), path), ControlClient(path) as client:
        assert client.get_statistics().total_blocks == 10


def test_server_removes_the_sockets_of_killed_servers(tmp_path, monkeypatch):
    """vLLM kills its engine process at each SIGTERM, and each process has a name of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "kv_pool"
    folder.mkdir(0o700)
    for name in ("control-vllm-1.sock", "control-vllm-2.sock", "other-3.sock"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(folder / name))
    (folder / "control-file.sock").write_text("mine")
    with ControlServer(make(), node_name="live"), ControlServer(make(20), node_name="new"):
        assert sorted(found.name for found in folder.iterdir()) == [
            "control-file.sock",
            "control-live.sock",
            "control-new.sock",
            "other-3.sock",
        ]
        with ControlClient(node="live") as client:
            assert client.get_statistics().total_blocks == 10


def test_socket_of_a_server_that_starts_is_no_dead_one(tmp_path, monkeypatch):
    """Between bind() and listen() its connections are refused, too; it holds the lock then."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    starting = tmp_path / "kv_pool" / "control-starting.sock"
    starting.parent.mkdir(0o700)
    with lock_socket(starting, 0), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(starting))
        with ControlServer(make(), node_name="new"):
            assert starting.exists()
    with ControlServer(make(), node_name="new"):
        assert not starting.exists()


def test_server_at_another_path_leaves_dead_sockets(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path.with_name("control-vllm-1.sock")))
    with ControlServer(make(), path):
        assert path.with_name("control-vllm-1.sock").exists()


def test_lock_on_the_folder_does_not_block_the_server(path):
    """A server in a world-writable folder used to wait for the lock for ever and to ignore signals."""
    path.parent.chmod(0o1777)
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with ControlServer(make(), path), ControlClient(path) as client:
        assert client.get_statistics().total_blocks == 10
    os.close(folder)


def test_lock_file_of_another_user_is_refused(path):
    if os.getuid():
        pytest.skip("only root gives files away")
    lock = path.with_name(".c.sock.lock")
    lock.touch(0o600)
    os.chown(lock, 65534, -1)
    with pytest.raises(ControlError, match=r"it belongs to user 65534, not to 0.* --socket"):
        ControlServer(make(), path).start()
    assert not path.exists()


def test_held_lock_is_retried_until_the_timeout(path):
    started_s = time.monotonic()
    with (
        lock_socket(path, 0),
        pytest.raises(ControlError, match="another server of yours holds this lock"),
        lock_socket(path, 0.1),
    ):
        raise AssertionError("two hold it")
    assert time.monotonic() - started_s > 0.1
    with lock_socket(path, 0):
        pass


def test_of_servers_replacing_one_dead_socket_one_remains(path):
    for _ in range(10):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(str(path))
        servers = [ControlServer(make(), path) for _ in range(4)]
        outcomes = [beside(server.start) for server in servers]
        errors = [outcome.exception(LONG) for outcome in outcomes]
        assert [type(error) for error in errors if error is not None] == [ControlError] * 3
        with ControlClient(path) as client:
            assert client.get_statistics().total_blocks == 10
        for server in servers:
            server.stop()
        assert list(path.parent.iterdir()) == []


def test_file_that_is_not_a_socket_is_left_unchanged(path):
    path.write_text("mine")
    with pytest.raises(ControlError, match="is not a socket and was left unchanged"):
        ControlServer(make(), path).start()
    assert path.read_text() == "mine"


def test_stopping_keeps_a_socket_that_replaced_its_own(path):
    server = ControlServer(make(), path)
    server.start()
    path.unlink()
    with ControlServer(make(20), path):
        server.stop()
        with ControlClient(path) as client:
            assert client.get_statistics().total_blocks == 20


def test_stopped_server_can_start_again(path):
    server = ControlServer(make(), path)
    for _ in range(2):
        with server, ControlClient(path) as client:
            assert client.get_statistics().total_blocks == 10
    server.stop()


@pytest.mark.parametrize("num_lines", range(1, 8))
def test_signal_handler_may_stop_a_server_that_stops(path, num_lines):
    """The outer call used to find a closed loop, or no thread to wait for."""
    server = ControlServer(make(), path)
    lines = []

    def trace(frame, event, argument):
        if frame.f_code is not ControlServer.stop.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == num_lines:
                server.stop()
        return trace

    server.start()
    sys.settrace(trace)
    try:
        server.stop()
    finally:
        sys.settrace(None)
    assert len(lines) >= num_lines
    assert list(path.parent.iterdir()) == []
    with server, ControlClient(path) as client:
        assert client.get_statistics().total_blocks == 10


def test_forked_child_leaves_the_socket_of_its_parent(path):
    """A child that left the `with` block used to remove it."""
    code = (
        "import os, sys\n"
        "from kv_pool import GPUKVPool\nfrom kv_pool.control import ControlClient, ControlServer\n"
        "with ControlServer(GPUKVPool(10, 16), sys.argv[1]) as server:\n"
        "    child = os.fork()\n"
        "    if child:\n"
        "        assert os.waitpid(child, 0)[1] == 0\n"
        "        with ControlClient(sys.argv[1]) as client: print(client.get_statistics().total_blocks)\n"
        "if not child: os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("10\n", 0), done.stderr
    assert not path.exists()


def test_forked_child_does_not_listen_after_the_death_of_its_parent(path):
    """A client used to connect and to wait for the child, and a new server refused to replace the socket."""
    code = (
        "import os, sys\n"
        "from kv_pool import GPUKVPool\nfrom kv_pool.control import ControlServer\n"
        "ControlServer(GPUKVPool(10, 16), sys.argv[1]).start()\n"
        "if os.fork(): os._exit(0)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE) as parent:
        assert parent.wait(60) == 0
        with pytest.raises(ControlError, match="no server listens on it any more"):
            ControlClient(path)
        with ControlServer(make(), path), ControlClient(path) as client:
            assert client.get_statistics().total_blocks == 10


def test_running_server_cannot_be_started_again(path):
    with ControlServer(make(), path) as server, pytest.raises(ControlError, match="already listens"):
        server.start()


# ---- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("/v1/stop", 404, "the commands under /v1/ are stats, defrag, layout"),
        ("/v1/stats/", 404, "GET /v1/stats/: Not Found"),
        ("/v1/defrag", 405, "Method Not Allowed"),
        ("/v1/stats?verbose=1", 400, "unknown field `verbose`; it takes none"),
        ("/v1/holds?block_id=-1", 400, "Expected `int` >= 0"),
        ("/v1/holds?block_id=11", 409, "block 11 is not one of 1 to 10"),
        ("/v1/peers", 409, "is not a node"),
    ],
)
def test_invalid_command_gets_an_error_and_the_next_a_reply(path, target, status, message):
    with ControlServer(make(), path), RawClient(path) as client:
        found, error = client.ask(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert found == status
        assert message in error["message"]
        assert is_stats(client.ask(STATS))


POST = b"POST /v1/defrag HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "reason", "status", "message"),
    [
        (b"\0\xff" * 500 + b"\r\n\r\n", "garbage", 400, "Invalid HTTP request"),
        (b'{"command":"stats"}\n', "garbage", 400, "this server speaks HTTP"),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000, "headers", 431, "the headers have at most 8192 bytes"),
        (POST % 5000 + b"x" * 5000, "body", 413, "a command has at most 4096 bytes"),
        (POST % 10**12 + b"x" * 100_000, "body", 413, "a command has at most 4096 bytes"),
        (STATS[:9], "slow", 408, "did not arrive within 0.2 s"),
        (POST % 5 + b"{", "slow", 408, "did not arrive within 0.2 s"),
    ],
)
def test_bad_request_is_refused_and_affects_no_other_client(path, request_bytes, reason, status, message):
    server = ControlServer(make(), path, timeout_s=0.2)
    with server, RawClient(path) as bad, RawClient(path) as other:
        bad.send(request_bytes)
        assert is_stats(other.ask(STATS))
        found, error = bad.read()
        assert found == status
        assert message in error["message"]
        assert bad.read() is None
        assert server.refusals == {reason: 1}
        assert is_stats(other.ask(STATS))


def test_client_that_disconnects_mid_command_affects_no_other(path):
    with ControlServer(make(), path) as server:
        for _ in range(20):
            with RawClient(path) as client:
                client.send(STATS[:7])
        with ControlClient(path) as client:
            assert client.get_statistics() == server.pool.get_statistics()


def test_command_of_a_client_that_has_left_is_not_carried_out(path):
    """Commands that waited for the pool used to stay in the queue for ever, whoever asked."""
    engine, seen = threading.Lock(), []
    pool = make_scattered(on_moved=seen.append)
    with ControlServer(pool, path, guard=engine), ControlClient(path) as other, RawClient(path) as first:
        with engine, RawClient(path) as live:
            first.send(STATS)
            for at in range(40):
                # Its last answers come after the server has seen what was sent, and all of them leave.
                assert live.ask(STATS.replace(b"v1/stats", b"live")) == (200, {"is_live": True})
                if 5 <= at < 35:
                    with RawClient(path) as client:
                        client.send(POST % 2 + b"{}")
        assert other.get_statistics().moved_blocks == 0
        assert is_stats(first.read())
    assert seen == []


def test_client_that_does_not_read_is_disconnected(path):
    pool = make(200_000)
    with ControlServer(pool, path, timeout_s=0.2), RawClient(path) as deaf, ControlClient(path) as other:
        deaf.send(STATS.replace(b"stats", b"layout") * 20)
        for _ in range(3):
            assert other.get_statistics().total_blocks == 200_000
        deaf.wait_for_hang_up()
        assert other.get_statistics().total_blocks == 200_000


def test_clients_beyond_the_limit_are_refused(path):
    with ControlServer(make(), path, max_clients=2), RawClient(path) as first, RawClient(path) as second:
        assert is_stats(first.ask(STATS))
        assert is_stats(second.ask(STATS))
        with RawClient(path) as third:
            status, error = third.read()
            assert status == 503
            assert "2 clients are already connected" in error["message"]
            assert third.read() is None
        assert is_stats(first.ask(STATS))


def test_clients_within_the_limit_are_not_refused(path):
    """A connection that was just accepted used to count twice."""
    for _ in range(50):
        server = ControlServer(make(), path, max_clients=2)
        with server, RawClient(path) as first, RawClient(path) as second:
            assert is_stats(first.ask(STATS))
            assert is_stats(second.ask(STATS))


def test_error_of_the_pool_is_raised_by_the_client(path):
    def fail(source, target, sources, targets):
        raise OSError("injected")

    pool = make_scattered(storage=make_storage(copy=fail))
    with ControlServer(pool, path), ControlClient(path) as client:
        with pytest.raises(CopyFailedError):
            client.defragment()
        assert client.get_statistics().moved_blocks == 0
    assert draw(pool) == "1.2.3.4.5."
    check(pool)


def test_error_of_a_callback_does_not_stop_the_server(path):
    def fail(relocation):
        raise ZeroDivisionError("by nothing")

    with ControlServer(make_scattered(on_moved=fail), path), ControlClient(path) as client:
        with pytest.raises(ControlError, match="the pool raised ZeroDivisionError: by nothing"):
            client.defragment()
        assert client.get_statistics().total_blocks == 10
