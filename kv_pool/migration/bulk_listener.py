"""`BulkListener`: the port of a node over which its backends send bytes of blocks."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from kv_pool.errors import (
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import bind_listener, format_address, tune
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import BulkOpened
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)

BulkHandler = Callable[[Channel, NodeName], None]
"""Serves one reader of a backend; called with the channel and the name of the reader's node.

The connection ends when it returns or raises a KVPoolError.
"""

_TICKET_BYTES = 16
_KEY_BYTES = 32
_OUT_OF_HANDLES_S = 0.1


@dataclass(frozen=True)
class _Admission:
    key: bytes
    handler: BulkHandler
    caller: NodeName
    deadline: float


class BulkListener:
    """Connections of readers that were admitted by an encrypted call: plain TCP, authenticated messages.

    A reader connects and sends its ticket; the connection is then a `Channel`, whose key was in the reply to
    that call. A ticket admits one connection. Anything else closes it.

    Args:
        handlers: by backend name; called in the thread of the connection.
        port: 0 selects a free port.
        max_readers: limit of admitted readers; one more gets an error.
        max_strangers: limit of connections without a ticket; one more closes the oldest.
        ticket_s: how long a ticket is valid, and how long a connection may wait before sending one.

    One thread accepts connections; each reader gets its own thread. If the system cannot start one, the
    connection is closed.

    Attributes:
        port: the port that readers are told; set it if they reach this node through a forwarded port.
    """

    def __init__(
        self,
        handlers: Mapping[str, BulkHandler],
        port: int = 0,
        *,
        max_readers: int = 256,
        max_strangers: int = 64,
        ticket_s: float = 5.0,
    ) -> None:
        self.port = port
        self._listen_port = port
        self._handlers = dict(handlers)
        self._max_readers = max_readers
        self._max_strangers = max_strangers
        self._ticket_s = ticket_s
        self._lock = threading.Lock()
        self._admitted: dict[bytes, _Admission] = {}  # by ticket
        self._readers: dict[Channel, threading.Thread] = {}
        self._waker: socket.socket | None = None
        self._accepting: threading.Thread | None = None

    def start(self, host: str) -> None:
        """Listen at this host, if there are handlers.

        Raises:
            EndpointError, OutOfThreadsError: as for `CallServer.start`. Nothing is open.
        """
        if not self._handlers:
            return
        with ExitStack() as on_failure:
            listener = on_failure.enter_context(bind_listener(format_address(host, self._listen_port)))
            port = listener.getsockname()[1]
            woken, waker = map(on_failure.enter_context, socket.socketpair())
            self._accepting = start_thread("kv_pool node readers", self._run, listener, woken)
            on_failure.pop_all()
        self._waker = waker
        if not self._listen_port:
            self.port = port

    def stop(self) -> None:
        """Close all connections and wait for their threads."""
        if self._waker is None or self._accepting is None:
            return
        self._waker.close()
        self._accepting.join()
        self._waker = self._accepting = None
        with self._lock:
            self._admitted.clear()
            readers = dict(self._readers)
        for channel, thread in readers.items():
            channel.abort()
            thread.join()

    def admit(self, backend: str, caller: NodeName) -> BulkOpened:
        """Admit one connection to a backend.

        Raises:
            MigrationError: this node has no such backend that serves bytes.
            PeerUnavailableError: `max_readers` connections are open or admitted.
        """
        handler = self._handlers.get(backend)
        if handler is None:
            known = ", ".join(sorted(self._handlers)) or "none"
            raise MigrationError(
                f"this node has no backend {backend!r} that serves bulk data; it has {known}"
            )
        ticket, key, now = os.urandom(_TICKET_BYTES), os.urandom(_KEY_BYTES), time.monotonic()
        with self._lock:
            self._admitted = {one: found for one, found in self._admitted.items() if found.deadline > now}
            num_readers = len(self._readers) + len(self._admitted)
            if num_readers >= self._max_readers:
                raise PeerUnavailableError(
                    f"{num_readers} connections are open, which is the maximum; try again later"
                )
            self._admitted[ticket] = _Admission(key, handler, caller, now + self._ticket_s)
        return BulkOpened(self.port, ticket, key)

    # ---- in the accepting thread -----------------------------------------------------------------

    def _run(self, listener: socket.socket, woken: socket.socket) -> None:
        strangers: dict[socket.socket, float] = {}  # connection -> deadline, oldest first
        with ExitStack() as open_, selectors.DefaultSelector() as selector:
            for one in (listener, woken):
                open_.enter_context(one)
                selector.register(one, selectors.EVENT_READ)

            def forget(connection: socket.socket) -> socket.socket:
                del strangers[connection]
                selector.unregister(connection)
                return connection

            while True:
                deadline = next(iter(strangers.values()), None)
                wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = [key.fileobj for key, _ in selector.select(wait_s)]
                for connection in [one for one in strangers if one in ready]:
                    self._use_ticket(forget(connection))
                if listener in ready and (accepted := self._accept(listener)) is not None:
                    strangers[accepted] = time.monotonic() + self._ticket_s
                    selector.register(accepted, selectors.EVENT_READ)
                now = float("inf") if woken in ready else time.monotonic()
                num_excess = len(strangers) - self._max_strangers
                for place, (connection, deadline) in enumerate(list(strangers.items())):
                    if place < num_excess or deadline <= now:
                        forget(connection).close()
                if woken in ready:
                    return

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        """Return a new connection; None if its client has closed it, or the system has no handle for it."""
        try:
            connection, _ = listener.accept()
            tune(connection)
        except ConnectionAbortedError:
            return None
        except OSError as error:
            _logger.warning("cannot accept a reader at port %d: %s", self.port, error)
            time.sleep(_OUT_OF_HANDLES_S)  # the connection is still waiting: do not spin
            return None
        return connection

    def _use_ticket(self, connection: socket.socket) -> None:
        """Start to serve the reader whose ticket has arrived; close any other connection."""
        try:
            place = format_address(*connection.getpeername()[:2])
            ticket = connection.recv(_TICKET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            connection.close()
            return
        with self._lock:
            admission = self._admitted.pop(ticket, None)
        if admission is None or admission.deadline <= time.monotonic():
            connection.close()
            _logger.info("closed a connection from %s: it has no valid ticket", place)
            return
        channel = Channel.of_source(connection, admission.key, place)
        try:
            with self._lock:  # the new thread takes the lock before it ends
                self._readers[channel] = start_thread(
                    f"kv_pool node for {place}", self._serve, channel, admission
                )
        except OutOfThreadsError as error:
            channel.close()
            _logger.warning("closed the connection of a reader: %s", error)

    # ---- in a reader's thread --------------------------------------------------------------------

    def _serve(self, channel: Channel, admission: _Admission) -> None:
        try:
            admission.handler(channel, admission.caller)
        except PeerAuthenticationError as error:
            _logger.warning("%s", error)
        except KVPoolError as error:
            _logger.debug("the connection from %s ended: %s", channel.peer, error)
        except Exception:
            _logger.exception("failed to serve a reader at %s", channel.peer)
        finally:
            channel.close()
            with self._lock:
                self._readers.pop(channel, None)
