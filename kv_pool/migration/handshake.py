"""How two nodes prove to each other that they know the secret, and what they sign messages with from then on.

    server -> client    "KVPOOL" | version | server's nonce (32 bytes)
    client -> server    "KVPOOL" | version | client's nonce (32 bytes) | proof "client" (32 bytes)
    server -> client    proof "server" (32 bytes); zeros to a client that it does not believe

    proof or key  =  HMAC-SHA256(secret, its purpose | version | server's nonce | client's nonce)

A purpose names the role, so that a proof sent back to its maker proves nothing. The client proves itself
first: a connection alone gets nothing that a weak secret could be guessed from. Before a side knows the
other, it reads exactly as many bytes as there are above, whatever is sent.
"""

import hmac
import os
import socket
import struct
import time

from kv_pool.errors import PeerAuthenticationError, PeerUnavailableError
from kv_pool.migration.channel import Channel
from kv_pool.migration.secret import check_secret

MAGIC = b"KVPOOL"
VERSION = 1

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HELLO = struct.Struct(f">{len(MAGIC)}sB{_NONCE_BYTES}s")


def greet_server(connection: socket.socket, secret: bytes, deadline: float, peer: str) -> Channel:
    """The client's side, over a connection just made.

    Args:
        deadline: a time of `time.monotonic()`, for all of it.
        peer: the server, in words; for messages.
    Raises:
        PeerUnavailableError: nothing answers there in time.
        PeerAuthenticationError: what answers is no node, speaks another version, or one of us does not know
            the other's secret. The connection is closed in either case.
    """
    check_secret(secret)
    plain = _PlainSide(connection, deadline, peer)
    server_nonce = plain.receive_hello()
    client_nonce = os.urandom(_NONCE_BYTES)
    nonces = server_nonce + client_nonce
    plain.send(_HELLO.pack(MAGIC, VERSION, client_nonce) + derive(secret, b"proof client", nonces))
    proof = plain.receive(_PROOF_BYTES)
    if not hmac.compare_digest(proof, derive(secret, b"proof server", nonces)):
        raise plain.refuse("it does not accept our secret, or does not know it itself")
    return Channel(
        connection,
        derive(secret, b"key client", nonces),
        derive(secret, b"key server", nonces),
        peer,
    )


class ClientGreeting:
    """The server's side of a handshake, over a connection just accepted. No call waits for the client.

    Args:
        connection: does not block from now on.
        peer: the client, in words; for messages.

    All calls raise as `greet_server`, and close the connection then. The caller limits the time.
    """

    def __init__(self, connection: socket.socket, secret: bytes, peer: str) -> None:
        check_secret(secret)
        self._connection = connection
        self._secret = secret
        self._peer = peer
        self._nonce = os.urandom(_NONCE_BYTES)
        self._received = bytearray()
        connection.setblocking(False)
        self._send(_HELLO.pack(MAGIC, VERSION, self._nonce))

    def go_on(self) -> Channel | None:
        """Read what has arrived; return the channel as soon as the client has proved itself, None before."""
        num_missing = _HELLO.size + _PROOF_BYTES - len(self._received)
        try:
            some = self._connection.recv(num_missing)
        except BlockingIOError:
            return None
        except OSError as error:
            raise _explain(self._connection, self._peer, error) from error
        if not some:
            raise _hang_up(self._connection, self._peer)
        self._received += some
        if len(self._received) < _HELLO.size:
            return None
        client_nonce = _check_hello(self._connection, bytes(self._received[: _HELLO.size]), self._peer)
        proof = self._received[_HELLO.size :]
        if len(proof) < _PROOF_BYTES:
            return None
        nonces = self._nonce + client_nonce
        if not hmac.compare_digest(bytes(proof), derive(self._secret, b"proof client", nonces)):
            self._send(bytes(_PROOF_BYTES))
            raise _refuse(self._connection, self._peer, "it does not know our secret")
        self._send(derive(self._secret, b"proof server", nonces))
        return Channel(
            self._connection,
            derive(self._secret, b"key server", nonces),
            derive(self._secret, b"key client", nonces),
            self._peer,
        )

    def _send(self, data: bytes) -> None:
        """Send a few bytes; a socket just accepted has room for them."""
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise _explain(self._connection, self._peer, error) from error


def derive(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    """A proof or a key, 32 bytes. Keys: `key client` signs what the client sends, `key server` the rest."""
    return hmac.digest(secret, purpose + bytes([VERSION]) + nonces, "sha256")


class _PlainSide:
    """A client's connection before the handshake is done: fixed sizes, one deadline."""

    def __init__(self, connection: socket.socket, deadline: float, peer: str) -> None:
        self._connection = connection
        self._deadline = deadline
        self._peer = peer

    def receive_hello(self) -> bytes:
        """The other side's nonce."""
        return _check_hello(self._connection, self.receive(_HELLO.size), self._peer)

    def receive(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                self._set_timeout()
                some = self._connection.recv(num_bytes - len(received))
            except OSError as error:
                raise _explain(self._connection, self._peer, error) from error
            if not some:
                raise _hang_up(self._connection, self._peer)
            received += some
        return bytes(received)

    def send(self, data: bytes) -> None:
        try:
            self._set_timeout()
            self._connection.sendall(data)
        except OSError as error:
            raise _explain(self._connection, self._peer, error) from error

    def refuse(self, why: str) -> PeerAuthenticationError:
        return _refuse(self._connection, self._peer, why)

    def _set_timeout(self) -> None:
        rest = self._deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        self._connection.settimeout(rest)


def _check_hello(connection: socket.socket, hello: bytes, peer: str) -> bytes:
    """The nonce in the other side's first message."""
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise _refuse(connection, peer, "what answers there is no kv_pool node")
    if version != VERSION:
        raise _refuse(
            connection, peer, f"it speaks version {version} of the protocol, and this is version {VERSION}"
        )
    assert isinstance(nonce, bytes)
    return nonce


def _refuse(connection: socket.socket, peer: str, why: str) -> PeerAuthenticationError:
    connection.close()
    return PeerAuthenticationError(f"{peer}: {why}")


def _hang_up(connection: socket.socket, peer: str) -> PeerUnavailableError:
    connection.close()
    return PeerUnavailableError(f"{peer} has hung up during the handshake")


def _explain(connection: socket.socket, peer: str, error: OSError) -> PeerUnavailableError:
    connection.close()
    why = "has not answered in time" if isinstance(error, TimeoutError) else f"is gone: {error}"
    return PeerUnavailableError(f"{peer} {why} during the handshake")
