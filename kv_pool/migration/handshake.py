"""The handshake: two nodes prove to each other that they know the secret and derive the message keys.

    server -> client    "KVPOOL" | version | server's nonce (32 bytes)
    client -> server    "KVPOOL" | version | client's nonce (32 bytes) | proof "client" (32 bytes)
    server -> client    proof "server" (32 bytes); zeros if the client's proof is wrong

    proof or key  =  HMAC-SHA256(secret, purpose | version | server's nonce | client's nonce)

The purpose contains the role, so a proof that is reflected to its sender is invalid. The client proves itself
first: a client without the secret gets no data from which a weak secret could be guessed. Until the peer is
authenticated, each side reads only the fixed sizes above.
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
    """Perform the client's side of the handshake over a new connection.

    Args:
        deadline: of the whole handshake, a `time.monotonic()` time.
        peer: a description of the server for error messages.
    Raises:
        PeerUnavailableError: the server does not answer in time.
        PeerAuthenticationError: the server is not a kv_pool node, uses another protocol version, or has
            another secret. The connection is closed in all cases.
    """
    check_secret(secret)
    plain = _PlainSide(connection, deadline, peer)
    server_nonce = plain.receive_hello()
    client_nonce = os.urandom(_NONCE_BYTES)
    nonces = server_nonce + client_nonce
    plain.send(_HELLO.pack(MAGIC, VERSION, client_nonce) + derive(secret, b"proof client", nonces))
    proof = plain.receive(_PROOF_BYTES)
    if not hmac.compare_digest(proof, derive(secret, b"proof server", nonces)):
        raise plain.refuse("the node has another secret")
    return Channel(
        connection,
        derive(secret, b"key client", nonces),
        derive(secret, b"key server", nonces),
        peer,
    )


class ClientGreeting:
    """The server's side of a handshake over an accepted connection. No call blocks.

    Args:
        connection: set to non-blocking mode.
        peer: a description of the client for error messages.

    All calls raise the errors of `greet_server` and close the connection. The caller enforces a time limit.
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
        """Read the available bytes; return the channel once the client is authenticated, None before."""
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
            raise _refuse(self._connection, self._peer, "the client does not know the secret")
        self._send(derive(self._secret, b"proof server", nonces))
        return Channel(
            self._connection,
            derive(self._secret, b"key server", nonces),
            derive(self._secret, b"key client", nonces),
            self._peer,
        )

    def _send(self, data: bytes) -> None:
        """Send a few bytes, which fit into the buffer of a new socket."""
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise _explain(self._connection, self._peer, error) from error


def derive(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    """Derive a proof or a key, 32 bytes.

    The key `key client` authenticates the client's messages, `key server` the server's.
    """
    return hmac.digest(secret, purpose + bytes([VERSION]) + nonces, "sha256")


class _PlainSide:
    """A client's connection during the handshake: reads of fixed size, one deadline."""

    def __init__(self, connection: socket.socket, deadline: float, peer: str) -> None:
        self._connection = connection
        self._deadline = deadline
        self._peer = peer

    def receive_hello(self) -> bytes:
        """Return the server's nonce."""
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
    """Return the nonce of the peer's first message."""
    magic, version, nonce = _HELLO.unpack(hello)
    if magic != MAGIC:
        raise _refuse(connection, peer, "the peer is not a kv_pool node")
    if version != VERSION:
        raise _refuse(connection, peer, f"the peer uses protocol version {version}, this node uses {VERSION}")
    assert isinstance(nonce, bytes)
    return nonce


def _refuse(connection: socket.socket, peer: str, why: str) -> PeerAuthenticationError:
    connection.close()
    return PeerAuthenticationError(f"{peer}: {why}")


def _hang_up(connection: socket.socket, peer: str) -> PeerUnavailableError:
    connection.close()
    return PeerUnavailableError(f"{peer} closed the connection during the handshake")


def _explain(connection: socket.socket, peer: str, error: OSError) -> PeerUnavailableError:
    connection.close()
    why = "did not answer in time" if isinstance(error, TimeoutError) else f"failed ({error})"
    return PeerUnavailableError(f"{peer} {why} during the handshake")
