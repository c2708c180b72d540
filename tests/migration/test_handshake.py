import socket
import threading
import time
from contextlib import suppress

import pytest
from migration.made_channels import LONG, Beside, greet_client, soon

from kv_pool.errors import InvalidArgumentError, PeerAuthenticationError, PeerUnavailableError
from kv_pool.migration.handshake import derive, greet_server

SECRET = b"the secret of all nodes"
HELLO_BYTES = 39
FROM_SERVER, FROM_CLIENT = HELLO_BYTES + 32, HELLO_BYTES + 32


def shake_hands(client_secret=SECRET, server_secret=SECRET, place=None, from_client=True):
    """Run a handshake in which the byte at `place` of one direction is changed; return both results."""
    client_end, client_wire = socket.socketpair()
    server_end, server_wire = socket.socketpair()

    def carry(source, target, changed):
        position = 0
        with suppress(OSError):
            while data := bytearray(source.recv(4096)):
                if changed is not None and position <= changed < position + len(data):
                    data[changed - position] ^= 0x10
                position += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    with client_end, client_wire, server_end, server_wire:
        carriers = [
            threading.Thread(target=carry, args=(client_wire, server_wire, place if from_client else None)),
            threading.Thread(target=carry, args=(server_wire, client_wire, None if from_client else place)),
        ]
        for carrier in carriers:
            carrier.start()
        client = Beside(greet_server, client_end, client_secret, soon(), "the server")
        server = Beside(greet_client, server_end, server_secret, soon(), "the client")
        errors = (client.get_error(), server.get_error())
        if errors == (None, None):
            client.get().send(b"hello", soon())
            assert server.get().receive(soon()) == b"hello"
            server.get().send(b"yourself", soon())
            assert client.get().receive(soon()) == b"yourself"
        client_end.close()
        server_end.close()
        for carrier in carriers:
            carrier.join(LONG)
        return errors


def test_nodes_with_the_same_secret_can_communicate():
    assert shake_hands() == (None, None)


def test_another_secret_is_refused_on_both_sides():
    client, server = shake_hands(client_secret=b"x" * 16)
    assert isinstance(client, PeerAuthenticationError)
    assert isinstance(server, PeerAuthenticationError)
    assert "has another secret" in str(client)
    assert "does not know the secret" in str(server)


@pytest.mark.parametrize("from_client", [True, False], ids=["from the client", "from the server"])
def test_a_change_of_any_byte_is_detected(from_client):
    for place in range(FROM_CLIENT if from_client else FROM_SERVER):
        client, server = shake_hands(place=place, from_client=from_client)
        noticed = [error for error in (client, server) if isinstance(error, PeerAuthenticationError)]
        assert noticed, f"byte {place}: {client!r}, {server!r}"
        # The side that sends the last proof is done after sending it, even if the proof is damaged.
        assert client is not None


def test_a_reflected_proof_is_refused():
    left, right = socket.socketpair()
    with left, right:
        victim = Beside(greet_server, left, SECRET, soon(), "the mirror")
        right.sendall(b"KVPOOL\x01" + bytes(32))
        answer = b""
        while len(answer) < HELLO_BYTES + 32:
            answer += right.recv(4096)
        right.sendall(answer[HELLO_BYTES:])
        assert isinstance(victim.get_error(), PeerAuthenticationError)


def test_a_replayed_client_is_refused():
    """The server's nonce is new each time, so a recorded client is invalid in a later handshake."""
    nonces = bytes(64)
    recorded = b"KVPOOL\x01" + bytes(32) + derive(SECRET, b"proof client", nonces)
    left, right = socket.socketpair()
    with left, right:
        server = Beside(greet_client, left, SECRET, soon(), "the recording")
        right.sendall(recorded)
        assert isinstance(server.get_error(), PeerAuthenticationError)
        answer = b""
        while data := right.recv(4096):
            answer += data
        assert answer[HELLO_BYTES:] == bytes(32)


def test_keys_and_proofs_are_all_different():
    purposes = (b"proof client", b"proof server", b"key client", b"key server")
    made = {derive(SECRET, purpose, bytes(64)) for purpose in purposes}
    made |= {derive(SECRET, purpose, bytes(63) + b"1") for purpose in purposes}
    made |= {derive(b"another" * 3, purpose, bytes(64)) for purpose in purposes}
    assert len(made) == 12


@pytest.mark.parametrize("greet", [greet_server, greet_client])
@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n" + bytes(200), "not a kv_pool node"),
        (b"KVPOOL\x02" + bytes(200), "uses protocol version 2, this node uses 1"),
    ],
)
def test_other_protocols_and_versions_are_named(greet, sent, why):
    left, right = socket.socketpair()
    with left, right:
        greeting = Beside(greet, left, SECRET, soon(), "stranger")
        right.sendall(sent)
        error = greeting.get_error()
        assert isinstance(error, PeerAuthenticationError)
        assert why in str(error)


@pytest.mark.parametrize("num_bytes", [0, 1, 38])
def test_a_slow_server_times_out_at_the_overall_deadline(num_bytes):
    left, right = socket.socketpair()
    with left, right:
        right.sendall(b"KVPOOL\x01".ljust(39, b"n")[:num_bytes])
        with pytest.raises(PeerUnavailableError, match="did not answer in time during the handshake"):
            greet_server(left, SECRET, time.monotonic() + 0.05, "a slow one")
        assert left.fileno() == -1


@pytest.mark.parametrize("greet", [greet_server, greet_client])
def test_a_closed_connection_is_a_peer_unavailable_error(greet):
    left, right = socket.socketpair()
    with left:
        right.close()
        with pytest.raises(PeerUnavailableError):
            greet(left, SECRET, soon(), "a short visitor")


def test_a_short_secret_is_refused_before_anything_is_sent():
    left, right = socket.socketpair()
    with left, right:
        with pytest.raises(InvalidArgumentError, match="16"):
            greet_server(left, b"short", soon(), "anybody")
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)
