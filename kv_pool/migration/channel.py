"""`Channel`: the raw bytes of blocks over a connection between two backends.

A channel carries nothing else. Every message about it is an encrypted call to the source:

    reader   OpenBulk                connect, ticket   ReadBlocks                   ReadBlocks ...
    source             BulkOpened                                   bytes of blocks
                       with a ticket                                then Acknowledged, or the error

The bytes are neither encrypted nor authenticated; blocks have their own checksums.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kv_pool.errors import PeerUnavailableError
from kv_pool.ids import BlockId, TransferId

_TIMEVAL = struct.Struct("@ll")
_MAX_BUFFERS = 1024  # limit of one sendmsg or recvmsg on Linux and macOS (IOV_MAX)


class Channel:
    """A connection for raw bytes, used by one thread at a time; only `abort` may be called from another.

    Args:
        connection: a connected socket. The channel takes ownership.
        peer: a description of the peer for error messages.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.connection = connection
        connection.settimeout(None)

    def send(self, views: Sequence[memoryview], deadline: float) -> None:
        """Send the bytes of these views in order, without copying.

        Args:
            deadline: a `time.monotonic()` time.
        Raises:
            PeerUnavailableError: the connection is broken, or the peer did not read them by the deadline. It
                cannot be used again.
        """
        self._transfer(views, deadline, socket.SO_SNDTIMEO, self.connection.sendmsg)

    def receive(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill these views in order, without copying.

        Raises:
            PeerUnavailableError: the peer closed the connection, or the views are not full by the deadline.
                Their content is undefined, and the connection cannot be used again.
        """

        def receive(batch: list[memoryview]) -> int:
            return self.connection.recvmsg_into(batch, 0, socket.MSG_WAITALL)[0]

        self._transfer(views, deadline, socket.SO_RCVTIMEO, receive)

    def is_quiet(self) -> bool:
        """Return True if the connection appears to be open and has no unread bytes."""
        try:
            self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self.connection.close()

    def abort(self) -> None:
        """Shut down the connection, also from another thread; its users at both ends get an error."""
        with suppress(OSError):  # already closed
            self.connection.shutdown(socket.SHUT_RDWR)

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
            except (TimeoutError, BlockingIOError) as error:
                raise PeerUnavailableError(f"{self.peer} did not answer in time") from error
            except OSError as error:
                raise PeerUnavailableError(
                    f"the connection to {self.peer} is broken: {error.strerror or error}"
                ) from error
            if not count:
                raise PeerUnavailableError(f"{self.peer} closed the connection")
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


SendBlocks = Callable[[Channel, TransferId, Sequence[BlockId]], object]
"""Sends the bytes of leased blocks to one reader of a backend; made by `BulkBackend.make_sender`."""
