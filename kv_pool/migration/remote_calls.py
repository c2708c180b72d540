"""`RemoteCalls`: calls to another node over TCP."""

from __future__ import annotations

import threading
import time

from kv_pool.errors import PeerUnavailableError
from kv_pool.ids import NodeName
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
    """Calls to the node that listens at an address. See `NodeCalls` for the contract of `call`.

    Args:
        address: host:port.
        secret: shared with that node.
        caller: the name of the calling node.

    The connection is opened by the first call. Concurrent calls use separate connections, so a long call does
    not delay others. Idle connections are reused; one that the node has closed is replaced before use.
    """

    def __init__(self, address: str, secret: bytes, caller: NodeName) -> None:
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
            self._return_channel(channel, is_whole)
        if isinstance(reply, CallFailed):
            raise_failure(reply, self.address)
        return reply

    def connect_bulk(self, backend: str, timeout_s: float) -> Channel:
        """Open a new connection to the node's backend of this name. The caller closes it.

        Raises:
            PeerUnavailableError, PeerAuthenticationError: as for `call`.
            MigrationError: the node does not have this backend.
        """
        return self._connect(backend, time.monotonic() + timeout_s)

    def close(self) -> None:
        """Close all connections. Calls in progress and later calls fail with PeerUnavailableError."""
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

    def _return_channel(self, channel: Channel, is_whole: bool) -> None:
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
