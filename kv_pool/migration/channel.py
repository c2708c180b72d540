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
from collections.abc import Callable, Sequence
from contextlib import suppress

from kv_pool.errors import InvalidArgumentError, PeerAuthenticationError, PeerUnavailableError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The maximum size of one message."""

_NUMBER = struct.Struct(">Q")
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_LENGTH_SIGN_BYTES = 16
_SIGN_BYTES = 32
_MAX_BUFFERS = 1024  # limit of one sendmsg or recvmsg on Linux and macOS (IOV_MAX)


class Channel:
    """An authenticated connection, used by one thread at a time; only `abort` may be called from another.

    Args:
        connection: a connected socket. The channel takes ownership.
        key: 32 bytes, chosen by the source.
        is_reader: which of the two ends this is.
        peer: a description of the peer for error messages.

    Every error closes the connection, except an oversized message to `send`.
    """

    def __init__(self, connection: socket.socket, key: bytes, is_reader: bool, peer: str) -> None:
        self.peer = peer
        self.connection = connection
        connection.settimeout(None)
        keys = [hmac.digest(key, side, "sha256") for side in (b"reader", b"source")]
        self._send_key, self._receive_key = keys if is_reader else reversed(keys)
        self._num_sent = self._num_received = 0

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
        length = _LENGTH.pack(len(payload))
        header = length + _sign(self._send_key, b"length", self._num_sent, length)[:_LENGTH_SIGN_BYTES]
        sign = _sign(self._send_key, b"payload", self._num_sent, payload)
        self._num_sent += 1
        self.send_raw([memoryview(header), memoryview(payload), memoryview(sign), *raw], deadline)

    def receive(self, deadline: float) -> bytes:
        """Return the payload of the next message.

        Raises:
            PeerUnavailableError: the peer closed the connection, or no message arrived by the deadline.
            PeerAuthenticationError: the message fails authentication or is larger than MAX_MESSAGE_BYTES.
        """
        header = bytearray(_LENGTH.size + _LENGTH_SIGN_BYTES)
        self.receive_raw([memoryview(header)], deadline)
        (length,) = _LENGTH.unpack_from(header)
        sign = _sign(self._receive_key, b"length", self._num_received, header[: _LENGTH.size])
        if not hmac.compare_digest(sign[:_LENGTH_SIGN_BYTES], header[_LENGTH.size :]):
            raise self._refuse("received a message without a valid MAC")
        if length > MAX_MESSAGE_BYTES:
            raise self._refuse(f"received a message of {length} bytes; the maximum is {MAX_MESSAGE_BYTES}")
        body = bytearray(length + _SIGN_BYTES)
        self.receive_raw([memoryview(body)], deadline)
        payload = bytes(memoryview(body)[:length])
        sign = _sign(self._receive_key, b"payload", self._num_received, payload)
        if not hmac.compare_digest(sign, body[length:]):
            raise self._refuse("received a message that was altered in transit")
        self._num_received += 1
        return payload

    def wait_for_more(self, timeout_s: float) -> bool:
        """Wait for data without consuming it; return False if none arrives within `timeout_s`.

        Raises:
            PeerUnavailableError: the peer closed the connection.
        """
        try:
            if timeout_s > 0:
                self._set_timeout(socket.SO_RCVTIMEO, time.monotonic() + timeout_s)
            some = self.connection.recv(1, socket.MSG_PEEK | (0 if timeout_s > 0 else socket.MSG_DONTWAIT))
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
        self._transfer(views, deadline, socket.SO_SNDTIMEO, self.connection.sendmsg)

    def receive_raw(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill these views in order, without copying.

        Raises:
            PeerUnavailableError: the peer closed the connection, or the views are not full by the deadline.
                Their content is undefined.
        """

        def receive(batch: list[memoryview]) -> int:
            return self.connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

        self._transfer(views, deadline, socket.SO_RCVTIMEO, receive)

    def is_quiet(self) -> bool:
        """Return True if the connection appears to be open and has no unread data."""
        try:
            return not self.wait_for_more(0.0)
        except PeerUnavailableError:
            return False

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self.connection.close()

    def abort(self) -> None:
        """Shut down the connection from another thread; its user gets a PeerUnavailableError."""
        with suppress(OSError):  # already closed
            self.connection.shutdown(socket.SHUT_RDWR)

    # ---- the socket ------------------------------------------------------------------------------

    def _transfer(
        self,
        views: Sequence[memoryview],
        deadline: float,
        option: int,
        call: Callable[[list[memoryview]], int],
    ) -> None:
        """Pass the views to a system call, which returns a number of bytes, until all are transferred."""
        rest = [view for view in reversed(views) if len(view)]
        while rest:
            try:
                self._set_timeout(option, deadline)
                count = call(rest[-1 : -_MAX_BUFFERS - 1 : -1])
            except OSError as error:
                raise self._explain(error) from error
            if not count:
                raise self._hang_up()
            while count:
                view = rest.pop()
                if count < len(view):
                    rest.append(view[count:])
                count = max(0, count - len(view))

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


def _sign(key: bytes, kind: bytes, number: int, data: bytes | bytearray) -> bytes:
    mac = hmac.new(key, kind + _NUMBER.pack(number), "sha256")
    mac.update(data)
    return mac.digest()
