"""Errors of a client without a working server."""

import os
import socket
import threading

import pytest
from adapter.made_pool import make

from kv_pool import ControlError
from kv_pool.control import ControlClient, ControlServer
from kv_pool.control.client import describe_failure

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
START_ONE = "Start one with kv-pool serve, or name another socket with --socket"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.sock"


def test_missing_socket_error_says_how_to_start_a_server(path):
    with pytest.raises(ControlError, match=f"there is no such socket. {START_ONE}"):
        ControlClient(path)


def test_dead_socket_error_says_how_to_start_a_server(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with pytest.raises(ControlError, match=f"no server listens on it any more. {START_ONE}"):
        ControlClient(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_socket_in_a_folder_of_another_user_is_refused_with_the_reason(tmp_path):
    """The look at what is there used to raise PermissionError itself."""
    (tmp_path / "private").mkdir(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(ControlError, match="to the user that started it"):
            ControlClient(tmp_path / "private" / "c.sock")
    finally:
        os.seteuid(0)


def test_socket_of_another_user_is_refused_with_the_reason(path):
    assert "to the user that started it" in describe_failure(path, PermissionError(13, "Permission denied"))


class _Listener:
    """A server that answers the first command with these bytes and closes the connection."""

    def __init__(self, path, answer):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._run, args=(answer,))

    def _run(self, answer):
        connection, _ = self._socket.accept()
        with connection:
            connection.recv(4096)
            if answer is None:
                connection.recv(4096)
            else:
                connection.sendall(answer)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._thread.join()
        self._socket.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "closed the connection; was it stopped?"),
        (OK % 99 + b'{"total_', "closed the connection; was it stopped?"),
        (b'{"result": {}}\n', r'is not one of this version of kv_pool: {"result": {}}\. Does the server'),
        (OK % 2 + b"{}", "the reply is not one of this version of kv_pool"),
        (OK.replace(b"200", b"404") % 2 + b"no", "the reply is not one of this version of kv_pool"),
        (
            OK.replace(b"200", b"409") % 55 + b'{"error": "OutOfBlocksError", "message": "asked for 3"}',
            "asked for 3",
        ),
    ],
)
def test_invalid_reply_is_refused_with_the_reason(path, answer, message):
    with (
        _Listener(path, answer),
        ControlClient(path) as client,
        pytest.raises((ControlError, ValueError), match=message),
    ):
        client.get_statistics()


def test_missing_reply_is_an_error_after_the_timeout(path):
    with (
        _Listener(path, None),
        ControlClient(path, timeout_s=0.1) as client,
        pytest.raises(ControlError, match=r"did not answer within 0.1 s; does its engine hold the lock"),
    ):
        client.get_statistics()


def test_server_stopped_between_commands_is_an_error(path):
    server = ControlServer(make(), path)
    server.start()
    with ControlClient(path) as client:
        client.get_statistics()
        server.stop()
        with pytest.raises(ControlError, match="closed the connection"):
            client.get_statistics()
        with pytest.raises(ControlError, match="there is no such socket"):
            client.get_statistics()
        with server:
            assert client.get_statistics().total_blocks == 10


def test_late_reply_is_not_used_for_the_next_command(path):
    """After Ctrl-C or a timeout, the reply to the cancelled command may still arrive."""
    engine = threading.Lock()
    server = ControlServer(make(total_blocks=10), path, guard=engine)
    with server, ControlClient(path, timeout_s=1.0) as client:
        with engine, pytest.raises(ControlError, match="did not answer"):
            client.get_statistics()
        assert client.defragment().moved_blocks == 0
