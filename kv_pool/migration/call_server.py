"""`CallServer`: the listening port of a node, for messages and for bulk data."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

from kv_pool.errors import (
    InvalidArgumentError,
    KVPoolError,
    MigrationError,
    OutOfThreadsError,
    PeerAuthenticationError,
    PeerUnavailableError,
)
from kv_pool.migration.addresses import bind_listener, format_address, is_loopback
from kv_pool.migration.call_failures import describe_failure
from kv_pool.migration.calls import Answer
from kv_pool.migration.channel import Channel
from kv_pool.migration.message_codec import decode_message, encode_message
from kv_pool.migration.messages import Message
from kv_pool.migration.open_handshakes import Handshake, OpenHandshakes
from kv_pool.migration.opening import agree, receive_opening
from kv_pool.migration.secret import check_secret
from kv_pool.threads import start_thread

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
        num_without_thread: proved it, but the system started no thread for them.
        num_forged: connections that ended because of a message that was not signed as it should be.
        num_calls: messages answered.
        num_failed_accepts: attempts to accept a connection that the system refused, such as without a handle.
    """

    num_accepted: int = 0
    num_unauthenticated: int = 0
    num_turned_away: int = 0
    num_without_thread: int = 0
    num_forged: int = 0
    num_calls: int = 0
    num_failed_accepts: int = 0


class CallServer:
    """Lets other nodes ask this one, and its backends serve them, from threads of its own.

    Args:
        listen: host:port; port 0 for any that is free. Whoever reaches it and knows the secret is served, so
            think before it is anything but a loopback address; a warning is logged then.
        secret: shared with the other nodes.
        answer: see `Answer`. What it raises goes back to the caller.
        bulk_handlers: by the name of a backend; called in the connection's own thread.
        max_connections: of nodes that know the secret; one more gets an error and is closed.
        max_strangers: connections without a proof of the secret; for one more, the oldest is closed. As many
            again may have proved it and not said yet what they are for.
        handshake_s: the time for both.

    One thread accepts connections and carries out the handshakes. A connection gets a thread of its own when
    its client has proved that it knows the secret: `max_connections + max_strangers` threads at most. Where
    the system starts no thread, that connection is closed and counted, and the next one is served as usual.
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
        self._entering: set[Channel] = set()  # proved, and not said yet what for
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
            EndpointError: the address cannot be used, such as a port in use. Nothing is open.
            OutOfThreadsError: the system starts no thread. Nothing is open.
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
        try:
            self._accepting = start_thread("kv_pool node", self._accept, self._listener, wakened)
        except OutOfThreadsError:
            for opened in (self._listener, wakened, self._waker):
                opened.close()
            self._listener = None
            raise

    def stop(self) -> None:
        """Close all connections. Returns when what was being answered has been.

        Not to be called with a lock held that an answer may wait for.
        """
        if self._listener is None or self._waker is None or self._accepting is None:
            return
        self._waker.close()
        self._accepting.join()
        self._listener.close()
        with self._lock:
            self._is_stopping = True
            for channel in self._entering | self._channels:
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
            handshakes = OpenHandshakes(
                selector, self._secret, self._max_strangers, self._handshake_s, self._count_stranger
            )
            is_stopping = False
            while not is_stopping:
                for key, _ in selector.select(handshakes.get_wait_s()):
                    try:
                        if key.fileobj is wakened:
                            is_stopping = True
                        elif key.fileobj is listener:
                            self._accept_one(listener, handshakes)
                        elif (channel := handshakes.go_on(key.data)) is not None:
                            self._start_serving(channel, key.data)
                    except OSError as error:
                        # Out of file handles, most likely, and the connection keeps the listener ready:
                        # without a rest this loop would spin until a handle is given back.
                        self._warn_of_failed_accept(error)
                        wakened.settimeout(_OUT_OF_HANDLES_S)
                        is_stopping = is_stopping or _has_ended(wakened)
                    except Exception:
                        logger.exception("a connection to %s was not served", self.address)
                handshakes.end_late()
            handshakes.close()

    def _accept_one(self, listener: socket.socket, handshakes: OpenHandshakes) -> None:
        try:
            connection, place = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # closed by its client before this call
        with self._lock:
            self.counts.num_accepted += 1
        handshakes.add(connection, format_address(*place[:2]))

    def _warn_of_failed_accept(self, error: OSError) -> None:
        with self._lock:
            self.counts.num_failed_accepts += 1
            num_failed = self.counts.num_failed_accepts
        if _is_power_of_two(num_failed):
            logger.warning(
                "can not accept connections at %s (attempt %d that failed): %s",
                self.address,
                num_failed,
                error,
            )

    def _start_serving(self, channel: Channel, handshake: Handshake) -> None:
        """Serve a client that has proved itself, in a thread of its own."""
        with self._lock:
            if len(self._entering) >= self._max_strangers:
                self.counts.num_turned_away += 1
                channel.close()
                return
            try:
                thread = start_thread(
                    f"kv_pool node for {handshake.place}",
                    self._serve,
                    channel,
                    handshake.place,
                    handshake.deadline,
                )
            except OutOfThreadsError as error:
                self.counts.num_without_thread += 1
                if _is_power_of_two(self.counts.num_without_thread):
                    logger.warning(
                        "connection number %d that was closed for want of a thread: %s",
                        self.counts.num_without_thread,
                        error,
                    )
                channel.close()
                return
            # The new thread takes the lock before it ends, so it is entered here before it is removed.
            self._entering.add(channel)
            self._threads.add(thread)

    # ---- in a connection's thread -----------------------------------------------------------------

    def _serve(self, channel: Channel, place: str, deadline: float) -> None:
        try:
            try:
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
            channel.close()
            with self._lock:
                self._entering.discard(channel)
                self._channels.discard(channel)
                self._threads.discard(threading.current_thread())

    def _count_stranger(self, place: str, error: Exception) -> None:
        with self._lock:
            self.counts.num_unauthenticated += 1
        logger.info("a connection from %s was not authenticated: %s", place, error)

    def _serve_channel(self, channel: Channel, caller: str, backend: str, deadline: float) -> None:
        handler = self._bulk_handlers.get(backend) if backend else self._answer_calls
        with self._lock:
            self._entering.discard(channel)
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


def _has_ended(wakened: socket.socket) -> bool:
    """Wait for the socket's timeout; True if its other end was closed meanwhile."""
    try:
        wakened.recv(1)
    except TimeoutError:
        return False
    return True


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
