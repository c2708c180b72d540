"""How two nodes prove to each other that they know the secret, and what they sign messages with from then on.

    server -> client    "KVPOOL" | version | server's nonce (32 bytes)
    client -> server    "KVPOOL" | version | client's nonce (32 bytes) | proof "client" (32 bytes)
    server -> client    proof "server" (32 bytes); zeros to a client that it does not believe

    proof or key  =  HMAC-SHA256(secret, its purpose | version | server's nonce | client's nonce)

A purpose names the role, so that a proof sent back to its maker proves nothing. The client goes first: who
merely connects to a node gets nothing that a weak secret could be guessed from. Before a side knows the
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


def greet_client(connection: socket.socket, secret: bytes, deadline: float, peer: str) -> Channel:
    """The server's side, over a connection just accepted. Arguments and errors as in `greet_server`."""
    check_secret(secret)
    plain = _PlainSide(connection, deadline, peer)
    server_nonce = os.urandom(_NONCE_BYTES)
    plain.send(_HELLO.pack(MAGIC, VERSION, server_nonce))
    nonces = server_nonce + plain.receive_hello()
    proof = plain.receive(_PROOF_BYTES)
    if not hmac.compare_digest(proof, derive(secret, b"proof client", nonces)):
        plain.send(bytes(_PROOF_BYTES))
        raise plain.refuse("it does not know our secret")
    plain.send(derive(secret, b"proof server", nonces))
    return Channel(
        connection,
        derive(secret, b"key server", nonces),
        derive(secret, b"key client", nonces),
        peer,
    )


def derive(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    """A proof or a key, 32 bytes. Keys: `key client` signs what the client sends, `key server` the rest."""
    return hmac.digest(secret, purpose + bytes([VERSION]) + nonces, "sha256")


class _PlainSide:
    """A connection before anybody has proved anything: fixed sizes, one deadline."""

    def __init__(self, connection: socket.socket, deadline: float, peer: str) -> None:
        self._connection = connection
        self._deadline = deadline
        self._peer = peer

    def receive_hello(self) -> bytes:
        """The other side's nonce."""
        magic, version, nonce = _HELLO.unpack(self.receive(_HELLO.size))
        if magic != MAGIC:
            raise self.refuse("what answers there is no kv_pool node")
        if version != VERSION:
            raise self.refuse(f"it speaks version {version} of the protocol, and this is version {VERSION}")
        assert isinstance(nonce, bytes)
        return nonce

    def receive(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                self._set_timeout()
                some = self._connection.recv(num_bytes - len(received))
            except OSError as error:
                raise self._explain(error) from error
            if not some:
                self._connection.close()
                raise PeerUnavailableError(f"{self._peer} has hung up during the handshake")
            received += some
        return bytes(received)

    def send(self, data: bytes) -> None:
        try:
            self._set_timeout()
            self._connection.sendall(data)
        except OSError as error:
            raise self._explain(error) from error

    def refuse(self, why: str) -> PeerAuthenticationError:
        self._connection.close()
        return PeerAuthenticationError(f"{self._peer}: {why}")

    def _explain(self, error: OSError) -> PeerUnavailableError:
        self._connection.close()
        why = "has not answered in time" if isinstance(error, TimeoutError) else f"is gone: {error}"
        return PeerUnavailableError(f"{self._peer} {why} during the handshake")

    def _set_timeout(self) -> None:
        rest = self._deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        self._connection.settimeout(rest)
