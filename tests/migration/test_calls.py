"""The contract of calls to a node, within a process and over ZeroMQ."""

import logging
import os
import socket
import threading
from contextlib import closing, contextmanager

import pytest
import zmq
from made_threads import no_new_threads
from migration.made_channels import LONG, beside, count_node_threads, wait_until
from migration.processes.flaky_proxy import FlakyProxy

from kv_pool import errors
from kv_pool.errors import (
    EndpointError,
    InvalidArgumentError,
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
    StaleTransferError,
)
from kv_pool.migration import remote_calls
from kv_pool.migration.addresses import connect_to
from kv_pool.migration.messages import (
    Acknowledged,
    AskPull,
    CallFailed,
    Cancelled,
    CancelTransfer,
    DescribeNode,
    RenewLease,
    call_local,
    decode_message,
    encode_message,
)
from kv_pool.migration.remote_calls import CallServer, RemoteCalls, _Connection
from kv_pool.migration.secret import derive_curve_pair

SECRET = b"the secret of all nodes"
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, KVPoolError)]


class Node:
    """A node that answers from `answers`, by the class of the message."""

    def __init__(self):
        self.asked = []
        self.answers = {CancelTransfer: lambda message: Cancelled(is_acknowledged=message.reason == "late")}

    def answer(self, message, caller):
        self.asked.append((message, caller))
        return self.answers[type(message)](message)

    def raise_on(self, kind, error):
        def answer(message):
            raise error

        self.answers[kind] = answer


@contextmanager
def serve(node):
    with CallServer("127.0.0.1:0", SECRET, node.answer) as server:
        yield server


class LocalCalls:
    """Calls to a node of this process."""

    def __init__(self, node):
        self.node = node

    def call(self, message, timeout_s):
        return call_local(self.node.answer, message, "caller")


@contextmanager
def connect_local(node):
    yield LocalCalls(node)


@contextmanager
def connect_remote(node):
    with serve(node) as server:
        calls = RemoteCalls(server.address, SECRET, "caller")
        yield calls
        calls.close()


@pytest.fixture(params=[connect_local, connect_remote], ids=["local", "remote"])
def connect(request):
    return request.param


class SlowNode(Node):
    """A node that answers `RenewLease` once it may go on."""

    def __init__(self):
        super().__init__()
        self.is_asked, self.may_go_on = threading.Event(), threading.Event()
        self.answers[RenewLease] = self.wait

    def wait(self, message):
        self.is_asked.set()
        self.may_go_on.wait(LONG)
        return Acknowledged()


def ask(calls, message=None, timeout_s=LONG):
    return calls.call(message or CancelTransfer(b"t" * 16, "late"), timeout_s)


# ---- both kinds ----------------------------------------------------------------------------------


def test_a_node_gets_the_callers_name_and_its_reply_returns(connect):
    node = Node()
    with connect(node) as calls:
        assert ask(calls) == Cancelled(is_acknowledged=True)
        assert ask(calls, CancelTransfer(b"t" * 16)) == Cancelled()
    assert node.asked[0] == (CancelTransfer(b"t" * 16, "late"), "caller")


def test_an_error_is_raised_with_its_type(connect):
    node = Node()
    with connect(node) as calls:
        for kind in ERRORS:
            node.raise_on(RenewLease, kind("because of 3 blocks"))
            with pytest.raises(kind, match="because of 3 blocks") as raised:
                ask(calls, RenewLease(b"t" * 16))
            assert type(raised.value) is kind


def test_unknown_errors_are_migration_errors(connect, caplog):
    node = Node()
    node.raise_on(RenewLease, ZeroDivisionError("by mistake"))
    node.answers[AskPull] = lambda message: CallFailed("NewerError", "of a later version")
    with connect(node) as calls:
        with pytest.raises(MigrationError, match="ZeroDivisionError: by mistake"):
            ask(calls, RenewLease(b"t" * 16))
        assert connect is connect_local or "failed to answer node caller" in caplog.text
        with pytest.raises(MigrationError, match="NewerError: of a later version"):
            ask(calls, AskPull(b"t" * 16))
        assert ask(calls) == Cancelled(is_acknowledged=True)


def test_many_threads_can_call_at_once(connect):
    node = Node()
    with connect(node) as calls:
        asking = [
            beside(lambda reason: [ask(calls, CancelTransfer(b"", reason)) for _ in range(50)], reason)
            for reason in ("late", "", "late", "")
        ]
        assert [outcome.result(LONG) for outcome in asking] == [
            [Cancelled(is_late)] * 50 for is_late in (True, False, True, False)
        ]


# ---- over ZeroMQ -----------------------------------------------------------------------------------


def test_a_long_call_does_not_delay_others():
    node = SlowNode()
    with connect_remote(node) as calls:
        waiting = beside(ask, calls, RenewLease(b"t" * 16))
        assert node.is_asked.wait(LONG)
        assert ask(calls) == Cancelled(is_acknowledged=True)
        with pytest.raises(PeerUnavailableError, match="did not answer in time"):
            ask(calls, RenewLease(b"t" * 16), 0.1)
        node.may_go_on.set()
        assert waiting.result(LONG) == Acknowledged()


def test_close_ends_a_call_in_progress_and_refuses_others():
    node = SlowNode()
    with connect_remote(node) as calls:
        waiting = beside(ask, calls, RenewLease(b"t" * 16))
        assert node.is_asked.wait(LONG)
        calls.close()
        assert isinstance(waiting.exception(LONG), PeerUnavailableError)
        with pytest.raises(PeerUnavailableError, match="closed"):
            ask(calls)
        node.may_go_on.set()


def test_connections_are_reused_and_replaced_after_a_restart():
    node = Node()
    with serve(node) as server:
        calls = RemoteCalls(server.address, SECRET, "caller")
        ask(calls)
        (first,) = calls._idle
        for _ in range(5):
            ask(calls)
        assert calls._idle == [first]
        address = server.address
    with pytest.raises(PeerUnavailableError, match=address):
        ask(calls)
    with CallServer(address, SECRET, node.answer) as server:
        assert ask(calls) == Cancelled(is_acknowledged=True)
        assert server.address == address
        calls.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_opens_its_own_connections():
    with connect_remote(Node()) as calls:
        ask(calls)
        (first,) = calls._idle
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = (
                    0 if ask(calls) == Cancelled(is_acknowledged=True) and first not in calls._idle else 2
                )
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert ask(calls) == Cancelled(is_acknowledged=True)
        assert calls._idle == [first]


def test_another_secret_is_refused_and_logged(caplog):
    caplog.set_level(logging.INFO, "kv_pool")
    node = Node()
    with serve(node) as server, closing(RemoteCalls(server.address, b"some other secret", "caller")) as calls:
        with pytest.raises(PeerAuthenticationError, match="another secret"):
            ask(calls)
        wait_until(lambda: "was not authenticated" in caplog.text)
    assert not node.asked


def test_the_servers_public_key_does_not_admit_a_client():
    node = Node()
    with serve(node) as server, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.curve_serverkey = derive_curve_pair(SECRET)[0]
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        refusals = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(f"tcp://{server.address}")
        stranger.send_multipart([b"caller", encode_message(DescribeNode())])
        assert refusals.poll(1000 * LONG)
        stranger.disable_monitor()
        refusals.close()
    assert not node.asked


def test_messages_are_encrypted():
    node, seen = Node(), bytearray()
    node.raise_on(RenewLease, StaleTransferError("confidential reply"))
    with serve(node) as server:
        proxy = FlakyProxy("no faults")
        proxy.upstream = server.address
        proxy._meddle = lambda data: seen.extend(data) or data
        with closing(RemoteCalls(proxy.address, SECRET, "confidential caller")) as calls:
            ask(calls, CancelTransfer(b"t" * 16, "confidential reason"))
            with pytest.raises(StaleTransferError, match="confidential reply"):
                ask(calls, RenewLease(b"t" * 16))
        proxy.close()
    assert len(seen) > 500
    assert b"confidential" not in seen
    assert SECRET not in seen


def test_a_short_secret_is_refused():
    with pytest.raises(InvalidArgumentError):
        RemoteCalls("127.0.0.1:1", b"short", "caller")
    with pytest.raises(InvalidArgumentError):
        CallServer("127.0.0.1:0", b"short", Node().answer)


def test_a_port_in_use_raises_an_endpoint_error():
    with serve(Node()) as server:
        other = CallServer(server.address, SECRET, Node().answer)
        with pytest.raises(EndpointError, match="cannot listen"):
            other.start()
        assert other.address == ""
        other.stop()
        with pytest.raises(InvalidArgumentError, match="already listening"):
            server.start()


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(100_000), b"\xff" + bytes(8) + b"\x7f\x03" + bytes(500)]
)
def test_garbage_does_not_affect_other_clients(garbage, monkeypatch):
    monkeypatch.setattr(remote_calls, "HANDSHAKE_S", 0.5)
    with serve(Node()) as server, closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
        ask(calls)
        for _ in range(5):
            with connect_to(server.address, LONG) as stranger:
                try:
                    stranger.sendall(garbage)
                    while stranger.recv(4096):
                        pass
                except ConnectionError:
                    pass
        ask(calls)
        assert len(calls._idle) == 1


def test_a_silent_stranger_times_out(monkeypatch):
    monkeypatch.setattr(remote_calls, "HANDSHAKE_S", 0.05)
    with serve(Node()) as server, connect_to(server.address, LONG) as stranger:
        stranger.settimeout(LONG)
        while stranger.recv(4096):
            pass


@pytest.mark.parametrize("num_bytes", [0, 1, 10, 63])
def test_half_open_connections_take_no_threads(num_bytes, monkeypatch):
    """Regression: with a limit of 30 threads, 64 such connections blocked a node permanently."""
    monkeypatch.setattr(remote_calls, "HANDSHAKE_S", LONG)
    with serve(Node()) as server:
        strangers = [connect_to(server.address, LONG) for _ in range(64)]
        for stranger in strangers:
            stranger.sendall((b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(64))[:num_bytes])
        with closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
            assert count_node_threads() == 1
            assert ask(calls) == Cancelled(is_acknowledged=True)
        for stranger in strangers:
            stranger.close()


def test_a_node_serves_again_after_a_thread_failed_to_start(caplog):
    with serve(Node()) as server, closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
        with no_new_threads():
            for _ in range(4):
                with pytest.raises(PeerUnavailableError, match="limit of threads"):
                    ask(calls)
        assert ask(calls) == Cancelled(is_acknowledged=True)
    assert caplog.text.count("refused a call") == 4


def test_start_without_a_thread_raises_and_opens_nothing():
    server = CallServer("127.0.0.1:0", SECRET, Node().answer)
    with no_new_threads(), pytest.raises(OutOfThreadsError, match="limit of threads"):
        server.start()
    assert server.address == ""
    server.stop()
    with server, closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
        assert ask(calls) == Cancelled(is_acknowledged=True)


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"], [b"\x80"], [b"\x81\xa4type\xa7Unknown"], [bytes(1000)]])
def test_an_authentic_unknown_message_gets_an_error_reply(frames):
    with serve(Node()) as server:
        connection = _Connection(server.address, derive_curve_pair(SECRET))
        connection.send([b"caller", *frames])
        assert b"MigrationError" in wait_for_reply(connection)
        connection.send([b"\xff", *frames])
        assert b"MigrationError" in wait_for_reply(connection)
        connection.close()


def test_malformed_requests_get_no_reply_and_the_next_one_does():
    with serve(Node()) as server:
        connection = _Connection(server.address, derive_curve_pair(SECRET))
        for frames in ([b"alone"], [b"one", b"two", b"three"]):
            connection.send(frames)
        connection.send([b"caller", encode_message(CancelTransfer(b"t", "late"))])
        assert decode_message(wait_for_reply(connection)) == Cancelled(is_acknowledged=True)
        connection.close()


def wait_for_reply(connection):
    while (reply := connection.receive(LONG)) is None:
        pass
    return reply


def test_listening_beyond_loopback_logs_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "kv_pool"):
        with serve(Node()):
            assert not caplog.records
        with CallServer("0.0.0.0:0", SECRET, Node().answer):
            assert "which other machines may reach" in caplog.text


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_works_as_well():
    server = CallServer("[::1]:0", SECRET, Node().answer)
    try:
        server.start()
    except EndpointError:
        pytest.skip("no IPv6 here")
    assert server.address.startswith("[::1]:")
    with closing(RemoteCalls(server.address, SECRET, "caller")) as calls:
        ask(calls)
    server.stop()
