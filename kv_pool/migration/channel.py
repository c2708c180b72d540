"""`Channel`: messages and raw bytes over a connection to a peer that has proved to know the secret.

Every message is framed and signed, each direction with a key of its own (see `handshake`), all integers
big-endian:

    length   4 bytes: of the payload
    sign     16 bytes: first half of HMAC-SHA256(key, "length" | number | length)
    payload  length bytes
    sign     32 bytes: HMAC-SHA256(key, "payload" | number | payload)

`number` counts the messages of a direction from 0 on, 8 bytes; it is not sent. So a message that was changed,
forged, left out, repeated or put into another order is noticed, and the length is trusted before anything is
waited for or put aside. Raw bytes follow a message that announces them, and carry no sign: blocks have
checksums of their own.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from kv_pool.errors import InvalidArgumentError, PeerAuthenticationError, PeerUnavailableError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Of one message; an offer of a million blocks with their tokens goes in pieces of this at most."""

_NUMBER_AND_LENGTH = struct.Struct(">QI")
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_LENGTH_SIGN_BYTES = 16
_SIGN_BYTES = 32
_MAX_BUFFERS = 1024  # what one sendmsg or recvmsg takes on Linux and macOS (IOV_MAX)


class Channel:
    """One connection, used by one thread at a time; `abort` alone may be called from another.

    Args:
        connection: its handshake is done; belongs to the channel from now on.
        send_key, receive_key: 32 bytes each; the peer has them the other way round.
        peer: whom it leads to, in words; for messages.

    Anything that goes wrong ends the connection: the error that says so is the last thing it gives.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes, peer: str) -> None:
        self.peer = peer
        self.connection = connection
        connection.settimeout(None)
        self._send_key = send_key
        self._receive_key = receive_key
        self._num_sent = 0
        self._num_received = 0
        self._is_open = True

    def send(self, payload: bytes, deadline: float, raw: Sequence[memoryview] = ()) -> None:
        """Send one message, and raw bytes behind it.

        Args:
            deadline: a time of `time.monotonic()`, here and below.
            raw: as for `send_raw`; together they take one call of the system, and wake the peer once.
        Raises:
            InvalidArgumentError: it is larger than MAX_MESSAGE_BYTES. Nothing was sent.
            PeerUnavailableError: the peer has gone, or does not take it by then.
        """
        if len(payload) > MAX_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"a message of {len(payload)} bytes for {self.peer}; {MAX_MESSAGE_BYTES} is the most"
            )
        length, length_sign, payload_sign = _sign(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        signed = [memoryview(part) for part in (length + length_sign, payload, payload_sign)]
        self.send_raw([*signed, *raw], deadline)

    def receive(self, deadline: float, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """The next message, of at most `max_bytes`.

        Raises:
            PeerUnavailableError: the peer has hung up, or it is not here by then.
            PeerAuthenticationError: not what the peer has sent, or larger than allowed.
        """
        header = bytearray(_LENGTH.size + _LENGTH_SIGN_BYTES)
        self.receive_raw([memoryview(header)], deadline)
        (length,) = _LENGTH.unpack_from(header)
        expected = _sign_length(self._receive_key, self._num_received, length)
        if not hmac.compare_digest(expected, header[_LENGTH.size :]):
            raise self._refuse("a message without a valid sign has come")
        if length > max_bytes:
            raise self._refuse(f"a message of {length} bytes has come where {max_bytes} is the most")
        body = bytearray(length + _SIGN_BYTES)
        self.receive_raw([memoryview(body)], deadline)
        payload = bytes(memoryview(body)[:length])
        if not hmac.compare_digest(
            _sign_payload(self._receive_key, self._num_received, payload), body[length:]
        ):
            raise self._refuse("a message has come that was changed on the way")
        self._num_received += 1
        return payload

    def wait_for_more(self, timeout_s: float) -> bool:
        """Wait until something comes, and leave it there; False if nothing has by then.

        Raises:
            PeerUnavailableError: the peer has hung up.
        """
        try:
            self._set_timeout(socket.SO_RCVTIMEO, time.monotonic() + timeout_s)
            some = self.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            raise self._explain(error) from error
        if not some:
            raise self._hang_up()
        return True

    def send_raw(self, views: Sequence[memoryview], deadline: float) -> None:
        """Send the bytes of these views, one after another, straight from their memory.

        Raises:
            PeerUnavailableError: the peer has gone, or does not take them by then.
        """
        rest = list(reversed(views))
        while rest:
            batch = rest[-1 : -_MAX_BUFFERS - 1 : -1]
            _drop_done(rest, len(batch), self._send_some(batch, deadline))

    def receive_raw(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill these views, one after another, straight into their memory.

        Raises:
            PeerUnavailableError: the peer has hung up, or they are not full by then. They may hold anything.
        """
        rest = list(reversed(views))
        while rest:
            batch = rest[-1 : -_MAX_BUFFERS - 1 : -1]
            _drop_done(rest, len(batch), self._receive_some(batch, deadline))

    def is_quiet(self) -> bool:
        """Is the connection open, as far as we know, and nothing has come that nobody has read?"""
        if not self._is_open:
            return False
        try:
            self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        """End the connection; again is harmless."""
        self._is_open = False
        self.connection.close()

    def abort(self) -> None:
        """End the connection under the thread that uses it, which then gets a PeerUnavailableError."""
        with suppress(OSError):  # it has ended before
            self.connection.shutdown(socket.SHUT_RDWR)

    # ---- the socket ------------------------------------------------------------------------------

    def _send_some(self, batch: list[memoryview], deadline: float) -> int:
        """All of it, unless the deadline passes; how much."""
        try:
            self._set_timeout(socket.SO_SNDTIMEO, deadline)
            return self.connection.sendmsg(batch)
        except OSError as error:
            raise self._explain(error) from error

    def _receive_some(self, batch: list[memoryview], deadline: float) -> int:
        """All of it, unless the deadline passes; how much."""
        wanted = any(len(view) for view in batch)
        try:
            self._set_timeout(socket.SO_RCVTIMEO, deadline)
            count = self.connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0] if wanted else 0
        except OSError as error:
            raise self._explain(error) from error
        if wanted and not count:
            raise self._hang_up()
        return count

    def _set_timeout(self, option: int, deadline: float) -> None:
        """Let a call end at the deadline. Raises TimeoutError where it has passed.

        The kernel keeps the time, and a call returns when all is done. With a timeout of Python's it would
        return, and be repeated, whenever the socket's buffer has some room or some bytes.
        """
        rest = deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        self.connection.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(int(rest), max(1, int(rest % 1 * 1e6)))
        )

    def _hang_up(self) -> PeerUnavailableError:
        self.close()
        return PeerUnavailableError(f"{self.peer} has hung up")

    def _explain(self, error: OSError) -> PeerUnavailableError:
        self.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            return PeerUnavailableError(f"{self.peer} has not answered in time")
        return PeerUnavailableError(f"the connection to {self.peer} is broken: {error.strerror or error}")

    def _refuse(self, why: str) -> PeerAuthenticationError:
        self.close()
        return PeerAuthenticationError(f"{self.peer}: {why}. The connection has been ended")


def _drop_done(rest: list[memoryview], num_views: int, num_bytes: int) -> None:
    """Take from the end of `rest`, of which `num_views` were offered, what `num_bytes` have done."""
    while num_views and num_bytes >= len(rest[-1]):
        num_bytes -= len(rest.pop())
        num_views -= 1
    if num_bytes:
        rest[-1] = rest[-1][num_bytes:]


def _sign_length(key: bytes, number: int, length: int) -> bytes:
    signed = b"length" + _NUMBER_AND_LENGTH.pack(number, length)
    return hmac.digest(key, signed, "sha256")[:_LENGTH_SIGN_BYTES]


def _sign_payload(key: bytes, number: int, payload: bytes) -> bytes:
    mac = hmac.new(key, b"payload" + _NUMBER_AND_LENGTH.pack(number, len(payload)), "sha256")
    mac.update(payload)
    return mac.digest()


def _sign(key: bytes, number: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    length = _LENGTH.pack(len(payload))
    return length, _sign_length(key, number, len(payload)), _sign_payload(key, number, payload)
