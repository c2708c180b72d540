"""What a client says when there is nobody to talk to."""

import socket
import threading

import pytest
from adapter.made_pool import make

from kv_pool import ControlError
from kv_pool.control import ControlClient, ControlServer
from kv_pool.control.client import describe_failure

START_ONE = "Start one with kv-pool serve, or name another socket with --socket"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.sock"


def test_no_socket_is_an_error_that_says_how_to_get_one(path):
    with pytest.raises(ControlError, match=f"there is no such socket. {START_ONE}"):
        ControlClient(path)


def test_a_socket_without_a_server_is_an_error_that_says_how_to_get_one(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with pytest.raises(ControlError, match=f"nobody listens there any more. {START_ONE}"):
        ControlClient(path)


def test_a_socket_of_somebody_else_is_an_error_that_says_so(path):
    assert "to the user who started it" in describe_failure(path, PermissionError(13, "Permission denied"))


class _Listener:
    """Answers the first command that comes with these bytes, and hangs up."""

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
        (b"", "hung up; was it stopped?"),
        (b'{"result": {"total_', "hung up; was it stopped?"),
        (b"HTTP/1.1 200 OK\r\n", "the answer is not one of this version of kv_pool"),
        (b'{"result": {}}\n', "the answer is not one of this version of kv_pool"),
        (b'{"error": "OutOfBlocksError", "message": "asked for 3"}\n', "asked for 3"),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_says_so(path, answer, message):
    with (
        _Listener(path, answer),
        ControlClient(path) as client,
        pytest.raises((ControlError, ValueError), match=message),
    ):
        client.get_statistics()


def test_no_answer_is_an_error_after_a_while(path):
    with (
        _Listener(path, None),
        ControlClient(path, timeout_s=0.1) as client,
        pytest.raises(ControlError, match=r"did not answer within 0.1 s; does its engine hold it"),
    ):
        client.get_statistics()


def test_a_server_that_stopped_in_between_is_an_error_that_says_so(path):
    server = ControlServer(make(), path)
    server.start()
    with ControlClient(path) as client:
        client.get_statistics()
        server.stop()
        with pytest.raises(ControlError, match="hung up"):
            client.get_statistics()


def test_a_late_reply_is_not_taken_for_that_of_the_next_command(path):
    """After Ctrl-C, or a timeout, the reply of the command that was given up may still come."""
    engine = threading.Lock()
    server = ControlServer(make(total_blocks=10), path, guard=engine)
    with server, ControlClient(path, timeout_s=1.0) as client:
        with engine, pytest.raises(ControlError, match="did not answer"):
            client.get_statistics()
        assert client.defragment().moved_blocks == 0
