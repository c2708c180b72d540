"""`OpenHandshakes`: accepted connections whose client is not yet authenticated."""

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
    """A handshake with one client.

    Attributes:
        place: the client's address, host:port.
        deadline: a `time.monotonic()` time.
    """

    connection: socket.socket
    place: str
    deadline: float
    greeting: ClientGreeting


class OpenHandshakes:
    """The open handshakes of a server, all handled by its accepting thread.

    Args:
        selector: each connection is registered here with its `Handshake` as data.
        max_open: limit of open handshakes; one more ends the oldest.
        timeout_s: time limit of each handshake.
        on_failed: called with the address and the error of each handshake that fails or is ended.

    Used by one thread. A silent client costs a socket, but no thread.
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
        """Start a handshake over an accepted connection."""
        if len(self._open) >= self._max_open:
            oldest = next(iter(self._open.values()))
            self._end(oldest, PeerUnavailableError(f"{oldest.place} was replaced by a newer connection"))
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
        """Continue a handshake whose connection is readable.

        Returns:
            The channel once the client is authenticated, then owned by the caller; None before.
        """
        if handshake.connection not in self._open:
            return None  # replaced by a newer connection after the selector reported it
        try:
            channel = handshake.greeting.go_on()
        except PeerUnavailableError as error:
            self._end(handshake, error)
            return None
        if channel is not None:
            self._forget(handshake)
        return channel

    def get_wait_s(self) -> float | None:
        """Return the seconds until the next handshake times out; None if there is none."""
        for handshake in self._open.values():
            return max(0.0, handshake.deadline - time.monotonic())
        return None

    def end_late(self) -> None:
        """End the handshakes that have timed out."""
        now = time.monotonic()
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.deadline > now:
                return
            self._end(oldest, PeerUnavailableError(f"{oldest.place} did not answer in time"))

    def close(self) -> None:
        """End all handshakes."""
        for handshake in list(self._open.values()):
            self._end(handshake, PeerUnavailableError("the node has stopped"))

    def _end(self, handshake: Handshake, error: PeerUnavailableError) -> None:
        self._forget(handshake)
        handshake.connection.close()
        self._on_failed(handshake.place, error)

    def _forget(self, handshake: Handshake) -> None:
        del self._open[handshake.connection]
        self._selector.unregister(handshake.connection)
