"""`Channel`: messages and raw bytes over a connection between two backends.

A message is two signed parts, its length in 4 bytes and its payload. A part is followed by its MAC of 32
bytes, HMAC-SHA256(key, number | part). Each direction has its own key, derived from one that the source has
sent over the encrypted connection for calls, and `number` counts its parts from 0, in 8 bytes; it is not
sent. All integers are big-endian.

A changed, forged, dropped, repeated or reordered message is therefore detected, and the length is verified
before memory is allocated for the payload. Raw bytes follow a message that announces them and have no MAC:
blocks have their own checksums.
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
_MAC_BYTES = 32
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
        views = []
        for part in (_LENGTH.pack(len(payload)), payload):
            views += [memoryview(part), memoryview(_sign(self._send_key, self._num_sent, part))]
            self._num_sent += 1
        self.send_raw([*views, *raw], deadline)

    def receive(self, deadline: float) -> bytes:
        """Return the payload of the next message.

        Raises:
            PeerUnavailableError: the peer closed the connection, or no message arrived by the deadline.
            PeerAuthenticationError: the message fails authentication or is larger than MAX_MESSAGE_BYTES.
        """
        (length,) = _LENGTH.unpack(self._receive_part(_LENGTH.size, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise self._refuse(f"received a message of {length} bytes; the maximum is {MAX_MESSAGE_BYTES}")
        return self._receive_part(length, deadline)

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

    # ---- inside ----------------------------------------------------------------------------------

    def _receive_part(self, num_bytes: int, deadline: float) -> bytes:
        """Return the next part of a message; raise the errors of `receive`."""
        part, mac = bytearray(num_bytes), bytearray(_MAC_BYTES)
        self.receive_raw([memoryview(part), memoryview(mac)], deadline)
        if not hmac.compare_digest(_sign(self._receive_key, self._num_received, part), mac):
            raise self._refuse("received a message without a valid MAC")
        self._num_received += 1
        return bytes(part)

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


def _sign(key: bytes, number: int, part: bytes | bytearray) -> bytes:
    mac = hmac.new(key, _NUMBER.pack(number), "sha256")
    mac.update(part)
    return mac.digest()
