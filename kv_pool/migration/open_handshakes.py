"""`OpenHandshakes`: connections whose client has not proved yet that it knows the secret."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_pool.errors import PeerUnavailableError
from kv_pool.migration.addresses import tune
from kv_pool.migration.channel import Channel
from kv_pool.migration.handshake import ClientGreeting


@dataclass
class Handshake:
    """One of them.

    Attributes:
        place: where the client is, host:port.
        deadline: a time of `time.monotonic()`.
    """

    connection: socket.socket
    place: str
    deadline: float
    greeting: ClientGreeting


class OpenHandshakes:
    """Handshakes with clients, all in the thread that accepts connections: a silent client costs a socket.

    Args:
        selector: has each connection, with its `Handshake` as data.
        max_open: for one more, the oldest is ended.
        timeout_s: for each.
        on_failed: called with the place and the error of each that fails or is ended.

    Used by one thread.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: bytes,
        max_open: int,
        timeout_s: float,
        on_failed: Callable[[str, Exception], None],
    ) -> None:
        self._selector = selector
        self._secret = secret
        self._max_open = max_open
        self._timeout_s = timeout_s
        self._on_failed = on_failed
        self._open: dict[socket.socket, Handshake] = {}  # oldest first

    def add(self, connection: socket.socket, place: str) -> None:
        """Begin a handshake over a connection that was just accepted."""
        if len(self._open) >= self._max_open:
            oldest = next(iter(self._open.values()))
            self._end(oldest, PeerUnavailableError(f"{oldest.place} made room for another connection"))
        try:
            tune(connection)
            greeting = ClientGreeting(connection, self._secret, place)
            handshake = Handshake(connection, place, time.monotonic() + self._timeout_s, greeting)
            self._selector.register(connection, selectors.EVENT_READ, handshake)
        except (PeerUnavailableError, OSError) as error:
            connection.close()
            self._on_failed(place, error)
        else:
            self._open[connection] = handshake

    def go_on(self, handshake: Handshake) -> Channel | None:
        """Take the next step of a handshake whose connection is readable.

        Returns:
            The channel if the client has proved itself; it belongs to the caller.
        """
        if handshake.connection not in self._open:
            return None  # ended to make room, after the selector had seen it
        try:
            channel = handshake.greeting.go_on()
        except PeerUnavailableError as error:
            self._end(handshake, error)
            return None
        if channel is not None:
            self._forget(handshake)
        return channel

    def get_wait_s(self) -> float | None:
        """Seconds until the next one is late; None if there is none."""
        for handshake in self._open.values():
            return max(0.0, handshake.deadline - time.monotonic())
        return None

    def end_late(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.deadline > now:
                return
            self._end(oldest, PeerUnavailableError(f"{oldest.place} has not answered in time"))

    def close(self) -> None:
        """End all."""
        for handshake in list(self._open.values()):
            self._end(handshake, PeerUnavailableError("the node has stopped"))

    def _end(self, handshake: Handshake, error: PeerUnavailableError) -> None:
        self._forget(handshake)
        handshake.connection.close()
        self._on_failed(handshake.place, error)

    def _forget(self, handshake: Handshake) -> None:
        del self._open[handshake.connection]
        self._selector.unregister(handshake.connection)
