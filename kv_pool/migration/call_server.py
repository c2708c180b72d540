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
from kv_pool.ids import NodeName
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

BulkHandler = Callable[[Channel, NodeName], None]
"""Serves one reader of a backend; called with the channel and the name of the reader's node.

The connection ends when it returns or raises a KVPoolError.
"""

_IDLE_S = 600.0  # callers replace a connection that was closed for idleness, at the cost of a handshake
_REPLY_S = 30.0
_OUT_OF_HANDLES_S = 0.1


@dataclass
class CallCounts:
    """Counts of a server since it was created.

    Attributes:
        num_accepted: accepted connections.
        num_unauthenticated: connections that did not prove knowledge of the secret, garbage included.
        num_refused: authenticated connections refused by a connection limit, or for a backend that this
            node does not have.
        num_without_thread: authenticated connections closed because the system could not start a thread.
        num_forged: connections ended by a message that failed authentication.
        num_calls: answered messages.
        num_failed_accepts: failed attempts to accept a connection, for example for lack of a file handle.
    """

    num_accepted: int = 0
    num_unauthenticated: int = 0
    num_refused: int = 0
    num_without_thread: int = 0
    num_forged: int = 0
    num_calls: int = 0
    num_failed_accepts: int = 0


class CallServer:
    """A TCP server that answers messages of other nodes and serves bulk data to readers of backends.

    Args:
        listen: host:port; port 0 selects a free port. Every client that knows the secret is served. A warning
            is logged if the address is not a loopback address.
        secret: shared with the other nodes.
        answer: see `Answer`. An error that it raises is sent to the caller.
        bulk_handlers: by backend name; called in the thread of the connection.
        max_connections: limit of authenticated connections. One more gets an error and is closed.
        max_unauthenticated: limit of connections in the handshake; one more closes the oldest. Also the limit
            of authenticated connections that have not sent their opening message.
        handshake_s: time limit of the handshake and the opening message together.

    One thread accepts connections and performs the handshakes. An authenticated connection gets its own
    thread, `max_connections + max_unauthenticated` threads at most. If the system cannot start a thread, the
    connection is closed and counted, and the server continues.
    """

    def __init__(
        self,
        listen: str,
        secret: bytes,
        answer: Answer,
        *,
        bulk_handlers: Mapping[str, BulkHandler] | None = None,
        max_connections: int = 256,
        max_unauthenticated: int = 64,
        handshake_s: float = 5.0,
    ) -> None:
        check_secret(secret)
        self.listen = listen
        self.counts = CallCounts()
        self._secret = secret
        self._answer = answer
        self._bulk_handlers = dict(bulk_handlers or {})
        self._max_connections = max_connections
        self._max_unauthenticated = max_unauthenticated
        self._handshake_s = handshake_s
        self._lock = threading.Lock()
        self._entering: set[Channel] = set()  # authenticated, opening message not yet received
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
        """The listening address, host:port with the actual port; "" while stopped."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return format_address(host, port)

    def start(self) -> None:
        """Start listening; nodes can connect on return.

        Raises:
            InvalidArgumentError: the server is already listening, or `listen` is not a valid address.
            EndpointError: the address cannot be used, such as a port in use. Nothing is open.
            OutOfThreadsError: the system cannot start a thread. Nothing is open.
        """
        if self._listener is not None:
            raise InvalidArgumentError(f"this server is already listening at {self.address}")
        self._listener = bind_listener(self.listen)
        self._listener.setblocking(False)
        if not is_loopback(self._listener.getsockname()[0]):
            logger.warning(
                "listening at %s, which other machines may reach: every client that knows the shared secret "
                "is served. Blocks are sent over the network unencrypted",
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
        """Close all connections and wait for the answers in progress.

        Do not call it while holding a lock that an answer may need.
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
                selector,
                self._secret,
                self._max_unauthenticated,
                self._handshake_s,
                self._note_unauthenticated,
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
                        # Probably out of file handles. The pending connection keeps the listener ready, so
                        # without a pause this loop would spin until a handle is released.
                        self._warn_of_failed_accept(error)
                        wakened.settimeout(_OUT_OF_HANDLES_S)
                        is_stopping = is_stopping or _has_ended(wakened)
                    except Exception:
                        logger.exception("failed to serve a connection to %s", self.address)
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
                "cannot accept connections at %s (failed attempt %d): %s",
                self.address,
                num_failed,
                error,
            )

    def _start_serving(self, channel: Channel, handshake: Handshake) -> None:
        """Serve an authenticated client in its own thread."""
        with self._lock:
            if len(self._entering) >= self._max_unauthenticated:
                self.counts.num_refused += 1
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
                        "closed connection number %d that got no thread: %s",
                        self.counts.num_without_thread,
                        error,
                    )
                channel.close()
                return
            # The new thread takes the lock before it ends, so these entries are added before it removes them.
            self._entering.add(channel)
            self._threads.add(thread)

    # ---- in a connection's thread -----------------------------------------------------------------

    def _serve(self, channel: Channel, place: str, deadline: float) -> None:
        try:
            try:
                opening = receive_opening(channel, deadline)
            except (PeerUnavailableError, OSError) as error:
                self._note_unauthenticated(place, error)
                return
            self._serve_channel(channel, opening.caller, opening.backend, deadline)
        except PeerAuthenticationError as error:
            with self._lock:
                self.counts.num_forged += 1
            logger.warning("%s", error)
        except KVPoolError as error:
            logger.debug("connection from %s ended: %s", place, error)
        except Exception:
            logger.exception("failed to serve a connection from %s", place)
        finally:
            channel.close()
            with self._lock:
                self._entering.discard(channel)
                self._channels.discard(channel)
                self._threads.discard(threading.current_thread())

    def _note_unauthenticated(self, place: str, error: Exception) -> None:
        with self._lock:
            self.counts.num_unauthenticated += 1
        logger.info("connection from %s was not authenticated: %s", place, error)

    def _serve_channel(self, channel: Channel, caller: NodeName, backend: str, deadline: float) -> None:
        handler = self._bulk_handlers.get(backend) if backend else self._answer_calls
        with self._lock:
            self._entering.discard(channel)
            refusal = self._find_refusal(backend, handler)
            if refusal is None:
                self._channels.add(channel)
            else:
                self.counts.num_refused += 1
        if handler is None or refusal is not None:
            agree(channel, deadline, None if refusal is None else describe_failure(refusal))
            return
        agree(channel, deadline)
        handler(channel, caller)

    def _find_refusal(self, backend: str, handler: BulkHandler | None) -> MigrationError | None:
        if handler is None:
            known = ", ".join(sorted(self._bulk_handlers)) or "none"
            return MigrationError(
                f"this node has no backend {backend!r} that serves bulk data; it has {known}"
            )
        if self._is_stopping or len(self._channels) >= self._max_connections:
            return PeerUnavailableError(
                f"{len(self._channels)} connections are open, which is the maximum; try again later"
            )
        return None

    def _answer_calls(self, channel: Channel, caller: NodeName) -> None:
        while channel.wait_for_more(_IDLE_S):
            data = channel.receive(time.monotonic() + _REPLY_S)
            reply = encode_message(self._answer_one(data, caller))
            channel.send(reply, time.monotonic() + _REPLY_S)
            with self._lock:
                self.counts.num_calls += 1

    def _answer_one(self, data: bytes, caller: NodeName) -> Message:
        try:
            return self._answer(decode_message(data), caller)
        except KVPoolError as error:
            return describe_failure(error)
        except Exception as error:
            logger.exception("failed to answer node %s", caller)
            return describe_failure(error)


def _has_ended(wakened: socket.socket) -> bool:
    """Wait for the socket's timeout; return True if its other end was closed during the wait."""
    try:
        wakened.recv(1)
    except TimeoutError:
        return False
    return True


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0
