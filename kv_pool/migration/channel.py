"""`Channel`: messages and raw bytes over a connection between two backends.

Every message is framed and authenticated with an HMAC (MAC below). Each direction has its own key, derived
from one that the source has sent over the encrypted connection for calls. All integers are big-endian:

    length   4 bytes: of the payload
    MAC      16 bytes: first half of HMAC-SHA256(key, "length" | number | length)
    payload  length bytes
    MAC      32 bytes: HMAC-SHA256(key, "payload" | number | payload)

`number` counts the messages of a direction from 0, in 8 bytes; it is not sent. A changed, forged, dropped,
repeated or reordered message is therefore detected, and the length is verified before memory is allocated
for the payload. Raw bytes follow a message that announces them and have no MAC: blocks have their own
checksums.
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
"""The maximum size of one message."""

_NUMBER_AND_LENGTH = struct.Struct(">QI")
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_LENGTH_SIGN_BYTES = 16
_SIGN_BYTES = 32
_MAX_BUFFERS = 1024  # limit of one sendmsg or recvmsg on Linux and macOS (IOV_MAX)


class Channel:
    """An authenticated connection, used by one thread at a time; only `abort` may be called from another.

    Args:
        connection: a connected socket. The channel takes ownership.
        send_key, receive_key: 32 bytes each, swapped at the peer.
        peer: a description of the peer for error messages.

    Every error closes the connection, except an oversized message to `send`.
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

    @classmethod
    def of_reader(cls, connection: socket.socket, key: bytes, peer: str) -> Channel:
        """Return the reader's end of a connection whose source has chosen `key`."""
        return cls(
            connection, hmac.digest(key, b"reader", "sha256"), hmac.digest(key, b"source", "sha256"), peer
        )

    @classmethod
    def of_source(cls, connection: socket.socket, key: bytes, peer: str) -> Channel:
        """Return the source's end."""
        return cls(
            connection, hmac.digest(key, b"source", "sha256"), hmac.digest(key, b"reader", "sha256"), peer
        )

    def send(self, payload: bytes, deadline: float, raw: Sequence[memoryview] = ()) -> None:
        """Send one message, followed by raw bytes.

        Args:
            deadline: a `time.monotonic()` time, here and below.
            raw: as for `send_raw`; sent in the same system call as the message.
        Raises:
            InvalidArgumentError: the payload is larger than MAX_MESSAGE_BYTES. Nothing was sent.
            PeerUnavailableError: the connection is broken, or the peer did not read it by the deadline.
        """
        if len(payload) > MAX_MESSAGE_BYTES:
            raise InvalidArgumentError(
                f"a message of {len(payload)} bytes for {self.peer}; the maximum is {MAX_MESSAGE_BYTES}"
            )
        header = _LENGTH.pack(len(payload)) + _sign_length(self._send_key, self._num_sent, len(payload))
        sign = _sign_payload(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        self.send_raw([memoryview(header), memoryview(payload), memoryview(sign), *raw], deadline)

    def receive(self, deadline: float, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
        """Return the payload of the next message, of at most `max_bytes`.

        Raises:
            PeerUnavailableError: the peer closed the connection, or no message arrived by the deadline.
            PeerAuthenticationError: the message fails authentication or is larger than `max_bytes`.
        """
        header = bytearray(_LENGTH.size + _LENGTH_SIGN_BYTES)
        self.receive_raw([memoryview(header)], deadline)
        (length,) = _LENGTH.unpack_from(header)
        expected = _sign_length(self._receive_key, self._num_received, length)
        if not hmac.compare_digest(expected, header[_LENGTH.size :]):
            raise self._refuse("received a message without a valid MAC")
        if length > max_bytes:
            raise self._refuse(f"received a message of {length} bytes; the maximum here is {max_bytes}")
        body = bytearray(length + _SIGN_BYTES)
        self.receive_raw([memoryview(body)], deadline)
        payload = bytes(memoryview(body)[:length])
        if not hmac.compare_digest(
            _sign_payload(self._receive_key, self._num_received, payload), body[length:]
        ):
            raise self._refuse("received a message that was altered in transit")
        self._num_received += 1
        return payload

    def wait_for_more(self, timeout_s: float) -> bool:
        """Wait for data without consuming it; return False if none arrives within `timeout_s`.

        Raises:
            PeerUnavailableError: the peer closed the connection.
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
        """Send the bytes of these views in order, without copying.

        Raises:
            PeerUnavailableError: the connection is broken, or the peer did not read them by the deadline.
        """
        rest = list(reversed(views))
        while rest:
            batch = rest[-1 : -_MAX_BUFFERS - 1 : -1]
            _drop_done(rest, len(batch), self._send_some(batch, deadline))

    def receive_raw(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill these views in order, without copying.

        Raises:
            PeerUnavailableError: the peer closed the connection, or the views are not full by the deadline.
                Their content is undefined.
        """
        rest = list(reversed(views))
        while rest:
            batch = rest[-1 : -_MAX_BUFFERS - 1 : -1]
            _drop_done(rest, len(batch), self._receive_some(batch, deadline))

    def is_quiet(self) -> bool:
        """Return True if the connection appears to be open and has no unread data."""
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
        """Close the connection. Safe to repeat."""
        self._is_open = False
        self.connection.close()

    def abort(self) -> None:
        """Shut down the connection from another thread; its user gets a PeerUnavailableError."""
        with suppress(OSError):  # already closed
            self.connection.shutdown(socket.SHUT_RDWR)

    # ---- the socket ------------------------------------------------------------------------------

    def _send_some(self, batch: list[memoryview], deadline: float) -> int:
        """Send until all is sent or the deadline passes; return the number of bytes."""
        try:
            self._set_timeout(socket.SO_SNDTIMEO, deadline)
            return self.connection.sendmsg(batch)
        except OSError as error:
            raise self._explain(error) from error

    def _receive_some(self, batch: list[memoryview], deadline: float) -> int:
        """Receive until all views are full or the deadline passes; return the number of bytes."""
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
        """Set the kernel timeout of the next call to the deadline. Raises TimeoutError if it has passed.

        With a kernel timeout a blocking call returns when all bytes are transferred. With a Python timeout it
        would return, and be repeated, whenever the socket buffer has some space or some bytes.
        """
        rest = deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError
        self.connection.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(int(rest), max(1, int(rest % 1 * 1e6)))
        )

    def _hang_up(self) -> PeerUnavailableError:
        self.close()
        return PeerUnavailableError(f"{self.peer} closed the connection")

    def _explain(self, error: OSError) -> PeerUnavailableError:
        self.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            return PeerUnavailableError(f"{self.peer} did not answer in time")
        return PeerUnavailableError(f"the connection to {self.peer} is broken: {error.strerror or error}")

    def _refuse(self, why: str) -> PeerAuthenticationError:
        self.close()
        return PeerAuthenticationError(f"{self.peer}: {why}. The connection was closed")


def _drop_done(rest: list[memoryview], num_views: int, num_bytes: int) -> None:
    """Remove the transferred `num_bytes` from the end of `rest`, whose last `num_views` were passed."""
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
