"""`RemoteCalls`: asks a node over TCP."""

from __future__ import annotations

import threading
import time

from kv_pool.errors import PeerUnavailableError
from kv_pool.migration.addresses import connect_to
from kv_pool.migration.call_failures import raise_failure
from kv_pool.migration.channel import Channel
from kv_pool.migration.handshake import greet_server
from kv_pool.migration.message_codec import decode_message, encode_message
from kv_pool.migration.messages import CallFailed, Message
from kv_pool.migration.opening import Opening, open_channel
from kv_pool.migration.secret import check_secret

_MAX_IDLE = 4


class RemoteCalls:
    """The node that listens at an address. See `NodeCalls` for what `call` promises.

    Args:
        address: host:port.
        secret: shared with that node.
        caller: the name of the node that asks.

    Connects when there is something to ask. Calls of several threads at once have a connection each, so that
    a long one holds up no other; connections are kept for the next calls. One that the node has closed in the
    meantime is replaced, before anything is sent over it.
    """

    def __init__(self, address: str, secret: bytes, caller: str) -> None:
        check_secret(secret)
        self.address = address
        self._secret = secret
        self._caller = caller
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._in_use: set[Channel] = set()
        self._is_closed = False

    def call(self, message: Message, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        channel = self._take_channel(deadline)
        is_whole = False
        try:
            channel.send(encode_message(message), deadline)
            reply = decode_message(channel.receive(deadline))
            is_whole = True
        finally:
            self._give_back(channel, is_whole)
        if isinstance(reply, CallFailed):
            raise_failure(reply, self.address)
        return reply

    def connect_bulk(self, backend: str, timeout_s: float) -> Channel:
        """A connection of its own to the node's backend of this name; the caller's to close.

        Raises:
            PeerUnavailableError, PeerAuthenticationError: as for `call`.
            MigrationError: the node has no such backend.
        """
        return self._connect(backend, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Hang up. Calls under way fail with PeerUnavailableError, and so do later ones."""
        with self._lock:
            self._is_closed = True
            for channel in self._idle:
                channel.close()
            self._idle.clear()
            for channel in self._in_use:
                channel.abort()

    def _take_channel(self, deadline: float) -> Channel:
        with self._lock:
            while self._idle:
                channel = self._idle.pop()
                if channel.is_quiet():
                    self._in_use.add(channel)
                    return channel
                channel.close()
        channel = self._connect("", deadline)
        with self._lock:
            if not self._is_closed:
                self._in_use.add(channel)
                return channel
        channel.close()
        raise PeerUnavailableError(f"{self.address}: these calls were closed")

    def _give_back(self, channel: Channel, is_whole: bool) -> None:
        with self._lock:
            self._in_use.discard(channel)
            if is_whole and not self._is_closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(channel)
                return
        channel.close()

    def _connect(self, backend: str, deadline: float) -> Channel:
        if self._is_closed:
            raise PeerUnavailableError(f"{self.address}: these calls were closed")
        connection = connect_to(self.address, deadline - time.monotonic())
        channel = greet_server(connection, self._secret, deadline, self.address)
        open_channel(channel, Opening(self._caller, backend), deadline)
        return channel
