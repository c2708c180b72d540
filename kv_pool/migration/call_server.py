"""`CallServer`: the listening port of a node, for messages and for bulk data."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    MigrationError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.migration.addresses import bind_listener, format_address, is_loopback, tune
from kv_pool.migration.call_failures import describe_failure
from kv_pool.migration.calls import Answer
from kv_pool.migration.channel import Channel
from kv_pool.migration.handshake import greet_client
from kv_pool.migration.message_codec import decode_message, encode_message
from kv_pool.migration.messages import Message
from kv_pool.migration.opening import agree, receive_opening
from kv_pool.migration.secret import check_secret

logger = logging.getLogger(__name__)

BulkHandler = Callable[[Channel, str], None]
"""Serves a backend's readers at the node of this name, until it returns or raises a KVPoolError."""

_IDLE_S = 600.0  # callers replace a connection that was closed meanwhile, so this costs them a handshake
_REPLY_S = 30.0
_OUT_OF_HANDLES_S = 0.1


@dataclass
class CallCounts:
    """What a server has seen since it started.

    Attributes:
        num_accepted: connections.
        num_unauthenticated: of them, those that did not prove to know the secret, garbage included.
        num_turned_away: proved it, but too many were connected, or what they wanted is not here.
        num_forged: connections that ended because of a message that was not signed as it should be.
        num_calls: messages answered.
    """

    num_accepted: int = 0
    num_unauthenticated: int = 0
    num_turned_away: int = 0
    num_forged: int = 0
    num_calls: int = 0


class CallServer:
    """Lets other nodes ask this one, and its backends serve them, from threads of its own.

    Args:
        listen: host:port; port 0 for any that is free. Whoever reaches it and knows the secret is served, so
            think before it is anything but a loopback address; a warning is logged then.
        secret: shared with the other nodes.
        answer: see `Answer`. What it raises goes back to the caller.
        bulk_handlers: by the name of a backend; called in the connection's own thread.
        max_connections: of nodes that know the secret; one more is told so and turned away.
        max_strangers: connections that have not proved anything yet; for one more, the oldest goes.
        handshake_s: how long a stranger has for that.

    A connection has a thread. What a stranger sends, or does not send, costs others nothing but that thread.
    """

    def __init__(
        self,
        listen: str,
        secret: bytes,
        answer: Answer,
        *,
        bulk_handlers: Mapping[str, BulkHandler] | None = None,
        max_connections: int = 256,
        max_strangers: int = 64,
        handshake_s: float = 5.0,
    ) -> None:
        check_secret(secret)
        self.listen = listen
        self.counts = CallCounts()
        self._secret = secret
        self._answer = answer
        self._bulk_handlers = dict(bulk_handlers or {})
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._channels: set[Channel] = set()
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None
        self._waker: socket.socket | None = None
        self._accepting: threading.Thread | None = None
        self._is_stopping = False

    def __enter__(self) -> CallServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where it listens, host:port with the real port; "" while it does not."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return format_address(host, port)

    def start(self) -> None:
        """Listen; when this returns, nodes can connect.

        Raises:
            InvalidArgumentError: it listens already, or `listen` is no address.
            EndpointError: the address can not be had, such as a port in use. Nothing is open.
        """
        if self._listener is not None:
            raise InvalidArgumentError(f"this server listens already, at {self.address}")
        self._listener = bind_listener(self.listen)
        self._listener.setblocking(False)
        if not is_loopback(self._listener.getsockname()[0]):
            logger.warning(
                "listening at %s, which other machines may reach: whoever knows the shared secret is served. "
                "Blocks go over the network as they are, not encrypted",
                self.address,
            )
        self._is_stopping = False
        wakened, self._waker = socket.socketpair()
        self._accepting = threading.Thread(
            target=self._accept, args=(self._listener, wakened), name="kv_pool node", daemon=True
        )
        self._accepting.start()

    def stop(self) -> None:
        """Hang up on everybody. Returns when what was being answered has been.

        Not to be called with a lock held that an answer may wait for.
        """
        if self._listener is None or self._waker is None or self._accepting is None:
            return
        self._waker.close()
        self._accepting.join()
        self._listener.close()
        with self._lock:
            self._is_stopping = True
            for stranger in self._strangers:
                _shut_down(stranger)
            for channel in self._channels:
                channel.abort()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
        self._listener = None

    # ---- in the accepting thread ------------------------------------------------------------------

    def _accept(self, listener: socket.socket, wakened: socket.socket) -> None:
        with wakened, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(wakened, selectors.EVENT_READ)
            while True:
                if any(key.fileobj is wakened for key, _ in selector.select()):
                    return
                try:
                    connection, place = listener.accept()
                except (BlockingIOError, ConnectionAbortedError):
                    continue  # it went before we came
                except OSError as error:
                    # Out of file handles, most likely, and the connection keeps the listener ready: without a
                    # rest this loop would spin until a handle is given back.
                    logger.warning("can not accept connections at %s: %s", self.address, error)
                    wakened.settimeout(_OUT_OF_HANDLES_S)
                    try:
                        wakened.recv(1)
                        return
                    except TimeoutError:
                        continue
                self._greet(connection, format_address(*place[:2]))

    def _greet(self, connection: socket.socket, place: str) -> None:
        tune(connection)
        thread = threading.Thread(
            target=self._serve, args=(connection, place), name=f"kv_pool node for {place}", daemon=True
        )
        with self._lock:
            self.counts.num_accepted += 1
            if len(self._strangers) >= self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]  # before its thread has noticed: the next one is another's turn
                _shut_down(oldest)
            self._strangers[connection] = None
            self._threads.add(thread)
        thread.start()

    # ---- in a connection's thread -----------------------------------------------------------------

    def _serve(self, connection: socket.socket, place: str) -> None:
        channel = None
        try:
            deadline = time.monotonic() + self._handshake_s
            try:
                channel = greet_client(connection, self._secret, deadline, place)
                opening = receive_opening(channel, deadline)
            except (PeerUnavailableError, OSError) as error:
                self._count_stranger(place, error)
                return
            self._serve_channel(channel, opening.caller, opening.backend, deadline)
        except PeerAuthenticationError as error:
            with self._lock:
                self.counts.num_forged += 1
            logger.warning("%s", error)
        except KVPoolError as error:
            logger.debug("a connection from %s has ended: %s", place, error)
        except Exception:
            logger.exception("serving a connection from %s has failed", place)
        finally:
            connection.close()
            with self._lock:
                self._strangers.pop(connection, None)
                if channel is not None:
                    self._channels.discard(channel)
                self._threads.discard(threading.current_thread())

    def _count_stranger(self, place: str, error: Exception) -> None:
        with self._lock:
            self.counts.num_unauthenticated += 1
        logger.info("a connection from %s was not authenticated: %s", place, error)

    def _serve_channel(self, channel: Channel, caller: str, backend: str, deadline: float) -> None:
        handler = self._bulk_handlers.get(backend) if backend else self._answer_calls
        with self._lock:
            self._strangers.pop(channel.connection, None)
            refusal = self._find_refusal(backend, handler)
            if refusal is None:
                self._channels.add(channel)
            else:
                self.counts.num_turned_away += 1
        if handler is None or refusal is not None:
            agree(channel, deadline, None if refusal is None else describe_failure(refusal))
            return
        agree(channel, deadline)
        handler(channel, caller)

    def _find_refusal(self, backend: str, handler: BulkHandler | None) -> MigrationError | None:
        if handler is None:
            known = ", ".join(sorted(self._bulk_handlers)) or "none"
            return MigrationError(f"this node has no backend {backend!r} that serves bytes; it has {known}")
        if self._is_stopping or len(self._channels) >= self._max_connections:
            return PeerUnavailableError(
                f"{len(self._channels)} connections are open already, which is the most; try again later"
            )
        return None

    def _answer_calls(self, channel: Channel, caller: str) -> None:
        while channel.wait_for_more(_IDLE_S):
            data = channel.receive(time.monotonic() + _REPLY_S)
            reply = encode_message(self._answer_one(data, caller))
            channel.send(reply, time.monotonic() + _REPLY_S)
            with self._lock:
                self.counts.num_calls += 1

    def _answer_one(self, data: bytes, caller: str) -> Message:
        try:
            return self._answer(decode_message(data), caller)
        except KVPoolError as error:
            return describe_failure(error)
        except Exception as error:
            logger.exception("answering %s has failed", caller)
            return describe_failure(error)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended before
        connection.shutdown(socket.SHUT_RDWR)
