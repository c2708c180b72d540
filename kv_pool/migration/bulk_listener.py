"""`BulkListener`: admits the connections over which this node's backends send bytes of blocks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kv_pool.errors import MigrationError, PeerUnavailableError
from kv_pool.ids import NodeName
from kv_pool.loggers import get_logger
from kv_pool.migration.addresses import bind_listener, format_address, tune
from kv_pool.migration.channel import Channel, SendBlocks
from kv_pool.migration.messages import Acknowledged, BulkOpened, OpenBulk, ReadBlocks

_logger = get_logger(__name__)

MAX_READERS = 256
MAX_STRANGERS = 64
TICKET_S = 5.0
"""How long a ticket is valid, and how long a connection may wait before it sends one."""
IDLE_S = 600.0
"""How long a connection may wait for its next read."""

_TICKET_BYTES = 16
_OUT_OF_HANDLES_S = 0.1
_LOOK_S = 0.2


@dataclass(eq=False)
class _Reader:
    """A reader that was admitted.

    Attributes:
        deadline: the end of its ticket, or of its idle time; not observed during a read.
        channel: None until the connection with its ticket has arrived.
        is_reading: True while a thread answers a read; only that thread uses the channel then.
    """

    caller: NodeName
    send: SendBlocks
    deadline: float
    channel: Channel | None = None
    is_reading: bool = False

    def close(self) -> None:
        """Shut its connection down, and close it unless a thread sends over it, which then does so."""
        if self.channel is not None:
            self.channel.abort()
            if not self.is_reading:
                self.channel.close()


class BulkListener:
    """The connections over which backends send bytes of blocks: plain TCP, admitted by encrypted calls.

    A reader connects and sends its ticket; after that it sends nothing. A ticket admits one connection and
    belongs to the node that it was given to. Anything else closes the connection, and so does a failed read.

    Args:
        senders: by backend name, `BulkBackend.make_sender`.
        port: 0 selects a free port.

    At most `MAX_READERS` readers are admitted. A connection without a ticket is closed after `TICKET_S`, and
    the oldest one when there are more than `MAX_STRANGERS`; one without reads is closed after `IDLE_S`.

    `CallServer` watches the sockets and calls `go_on` in its thread. The threads that answer calls `admit`
    readers and `send` blocks; the one that sends over a connection is the only one that closes it then.

    Attributes:
        port: the port that readers are told; set it if they reach this node through a forwarded port.
    """

    def __init__(self, senders: Mapping[str, Callable[[bytes], SendBlocks]], port: int = 0) -> None:
        self.port = port
        self._listen_port = port
        self._senders = senders
        self._listener: socket.socket | None = None
        self._strangers: dict[socket.socket, float] = {}  # connection -> deadline, oldest first
        self._readers: dict[bytes, _Reader] = {}  # by ticket
        self._changed = threading.Condition()  # guards the readers
        self._looked_s = 0.0  # when `go_on` last looked at the readers: it is called at each message

    def start(self, host: str) -> None:
        """Listen at this host, if a backend sends blocks. Raises EndpointError; nothing is open then."""
        if self._senders:
            self._listener = bind_listener(format_address(host, self._listen_port))
            self.port = self._listen_port or self._listener.getsockname()[1]

    def stop(self) -> None:
        """Close all connections; reads in progress end with an error. Called after the last `go_on`."""
        for connection in self.list_sockets():
            connection.close()
        self._listener, self._strangers = None, {}
        with self._changed:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()
            self._changed.notify_all()

    # ---- in a thread for answers -----------------------------------------------------------------

    def admit(self, message: OpenBulk, caller: NodeName) -> BulkOpened:
        """Admit one connection to a backend.

        Raises:
            MigrationError: this node has no such backend that sends blocks.
            PeerUnavailableError: `MAX_READERS` readers are admitted.
            Errors of `BulkBackend.make_sender`.
        """
        make_sender = self._senders.get(message.backend)
        if make_sender is None:
            known = ", ".join(sorted(self._senders)) or "none"
            raise MigrationError(
                f"this node has no backend {message.backend!r} that serves bulk data; it has {known}"
            )
        reader = _Reader(caller, make_sender(message.description), time.monotonic() + TICKET_S)
        ticket = os.urandom(_TICKET_BYTES)
        with self._changed:
            if len(self._readers) >= MAX_READERS:
                raise PeerUnavailableError(
                    f"{len(self._readers)} connections are open, which is the maximum; try again later"
                )
            self._readers[ticket] = reader
        return BulkOpened(self.port, ticket)

    def send(self, message: ReadBlocks, caller: NodeName) -> Acknowledged:
        """Send the blocks of one read over the connection with its ticket, which may still arrive.

        Raises:
            PeerUnavailableError: there is no such connection, or it broke.
            MigrationError: it is in use by another read.
            Errors of the sender, after which the connection is closed.
        """
        with self._changed:
            reader = self._readers.get(message.ticket)
            if reader is None or reader.caller != caller:
                raise PeerUnavailableError(f"no connection of node {caller!r} has this ticket")
            if reader.is_reading:
                raise MigrationError("another read uses this connection")
            reader.is_reading = True
            self._changed.wait_for(lambda: reader.channel or message.ticket not in self._readers, TICKET_S)
        is_sent = False
        try:
            if reader.channel is None:
                raise PeerUnavailableError("the connection with this ticket has not arrived")
            reader.send(reader.channel, message.transfer_id, message.block_ids)
            is_sent = True
        finally:
            with self._changed:
                reader.is_reading, reader.deadline = False, time.monotonic() + IDLE_S
                if not is_sent:
                    self._readers.pop(message.ticket, None)
                if message.ticket not in self._readers:  # the listener may have been stopped meanwhile
                    reader.close()
        return Acknowledged()

    # ---- in the thread of the server -------------------------------------------------------------

    def is_used(self) -> bool:
        """Return True while there are readers, or connections without a ticket."""
        return bool(self._readers or self._strangers)

    def list_sockets(self) -> list[socket.socket]:
        """Return the sockets to watch: the listening one, and those of connections without a ticket."""
        return [*self._strangers] if self._listener is None else [self._listener, *self._strangers]

    def go_on(self, readable: Sequence[socket.socket]) -> None:
        """Accept connections, read tickets, and close what has ended, is late, or is too much.

        Args:
            readable: those of `list_sockets` with something to read. Call it each second, also with [], while
                `is_used`.
        """
        for one in readable:
            if one is self._listener:
                self._accept(one)
            else:
                del self._strangers[one]
                self._use_ticket(one)
        now = time.monotonic()
        while self._strangers:
            oldest, deadline = next(iter(self._strangers.items()))
            if len(self._strangers) <= MAX_STRANGERS and deadline > now:
                break
            del self._strangers[oldest]
            oldest.close()
        if now < self._looked_s + _LOOK_S:
            return
        self._looked_s = now
        with self._changed:
            for ticket, reader in list(self._readers.items()):
                if reader.is_reading:
                    continue
                # A reader sends nothing after its ticket: its connection is quiet until its end.
                if reader.deadline <= now or (reader.channel is not None and not reader.channel.is_quiet()):
                    del self._readers[ticket]
                    reader.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
            tune(connection)
            self._strangers[connection] = time.monotonic() + TICKET_S
        except ConnectionAbortedError:
            pass  # closed by its client before this call
        except OSError as error:
            _logger.warning("cannot accept a reader at port %d: %s", self.port, error)
            time.sleep(_OUT_OF_HANDLES_S)  # the connection is still waiting: do not spin

    def _use_ticket(self, connection: socket.socket) -> None:
        """Connect the reader whose ticket has arrived; close any other connection."""
        ticket = b""
        with suppress(OSError):  # the connection is broken
            ticket = connection.recv(_TICKET_BYTES, socket.MSG_DONTWAIT)
        with self._changed:
            reader = self._readers.get(ticket)
            if reader is not None and reader.channel is None and reader.deadline > time.monotonic():
                reader.channel = Channel(connection, f"node {reader.caller!r}")
                reader.deadline = time.monotonic() + IDLE_S
                self._changed.notify_all()
                return
        connection.close()
        _logger.info("closed a connection to port %d without a valid ticket", self.port)
