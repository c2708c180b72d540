"""`ReaderConnections`: counts, limits and closes the connections to a publisher's sockets."""

import fcntl
import logging
import re
import socket
import struct
import termios
import threading
from contextlib import suppress
from typing import Any

from kv_pool.events.rare_warnings import is_worth_logging
from kv_pool.events.zmq_module import zmq
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)
_EVENT = struct.Struct("=HI")
_COUNT = struct.Struct("i")


class ReaderConnections:
    """The connections of readers; closes those beyond a limit at once, and others on request.

    ZeroMQ frees the messages held for a reader when its connection ends, but has no call that ends one. It
    does report the file descriptor of each connection, so this class shuts down the connection itself. By
    then the descriptor may belong to another file: it is duplicated first, and shut down only if it is
    a connection to one of the watched endpoints.

    Args:
        max_readers: maximum number of connections to all watched sockets together.

    Attributes:
        num_refused: connections that were closed because `max_readers` were open.

    Runs a thread of its own from `start` to `stop`; the other methods may be called from any thread.
    """

    def __init__(self, max_readers: int) -> None:
        self.max_readers = max_readers
        self.num_refused = 0
        self._lock = threading.Lock()
        self._monitors: list[tuple[zmq.SyncSocket, set[int]]] = []
        self._addresses: set[int | str] = set()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread: threading.Thread | None = None

    def watch(self, one: "zmq.SyncSocket") -> None:
        """Monitor the connections of a socket. Call this before the socket is bound, and before `start`."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitors.append((one.get_monitor_socket(events), set()))

    def add_address(self, endpoint: str) -> None:
        """Register the endpoint of a watched socket, with its actual port."""
        if address := _find_address(endpoint):
            self._addresses.add(address)

    def start(self) -> None:
        """Start the thread that counts connections.

        Raises:
            OutOfThreadsError: the system starts no more threads. Nothing has changed.
        """
        self._thread = start_thread("kv_pool event readers", self._run)

    def stop(self) -> None:
        """Stop the thread and close the monitors. The watched sockets may be closed before or after."""
        if self._thread is not None:
            self._wake_writer.send(b"x")
            self._thread.join()
        for monitor, _ in self._monitors:
            monitor.close(linger=0)
        self._monitors.clear()
        self._wake_reader.close()
        self._wake_writer.close()

    def __len__(self) -> int:
        """Return the number of connections to all watched sockets."""
        with self._lock:
            return sum(len(descriptors) for _, descriptors in self._monitors)

    def cut(self, descriptor: int) -> bool:
        """Shut down a connection; return False if the descriptor is not a connection to a watched socket."""
        connection = self._duplicate(descriptor)
        if connection is None:
            return False
        with connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                return False
        return True

    def cut_slowest(self) -> bool:
        """Close the first watched socket's connection with the most unsent bytes; False if none has any."""
        with self._lock:
            descriptors = list(self._monitors[0][1])
        num_unsent, slowest = max(
            ((self._count_unsent(descriptor), descriptor) for descriptor in descriptors), default=(0, -1)
        )
        return num_unsent > 0 and self.cut(slowest)

    def _count_unsent(self, descriptor: int) -> int:
        """Return the number of bytes in the kernel's send buffer."""
        connection = self._duplicate(descriptor)
        if connection is None:
            return 0
        with connection:
            try:
                answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
            except OSError:
                return 0
        return int(_COUNT.unpack(answer)[0])

    def _duplicate(self, descriptor: int) -> socket.socket | None:
        """Duplicate the descriptor of a connection to one of the endpoints; None for any other descriptor."""
        try:
            connection = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return None
        names: list[Any] = []
        with suppress(OSError):
            # The endpoint is the local name of an accepted connection, the peer name of an outgoing one.
            names = [connection.getsockname(), connection.getpeername()]
        if any(_name_address(name) in self._addresses for name in names):
            return connection
        connection.close()
        return None

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader.fileno(), zmq.POLLIN)
        for monitor, _ in self._monitors:
            poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_reader.fileno() in ready:
                return
            for monitor, descriptors in self._monitors:
                if monitor in ready and not self._read(monitor, descriptors):
                    poller.unregister(monitor)

    def _read(self, monitor: "zmq.SyncSocket", descriptors: set[int]) -> bool:
        """Handle the events of a monitor; return False when it has ended."""
        while True:
            try:
                event, descriptor = _EVENT.unpack(monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            except zmq.ZMQError:
                return False
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                is_refused = event == zmq.EVENT_ACCEPTED and len(self) >= self.max_readers
                with self._lock:
                    descriptors.add(descriptor)
                if is_refused:
                    self._refuse(descriptor)
            else:
                with self._lock:
                    descriptors.discard(descriptor)
        return True

    def _refuse(self, descriptor: int) -> None:
        self.cut(descriptor)
        self.num_refused += 1
        if is_worth_logging(self.num_refused):
            _logger.warning(
                "%d connections refused so far: %d readers are connected; raise max_readers to admit more",
                self.num_refused,
                self.max_readers,
            )


def _find_address(endpoint: str) -> int | str | None:
    """Return the `_name_address` of connections to this endpoint; None for inproc."""
    if endpoint.startswith("ipc://"):
        return endpoint.removeprefix("ipc://")
    match = re.fullmatch(r"tcp://.*:(\d+)", endpoint)
    return int(match[1]) if match else None


def _name_address(name: Any) -> int | str | None:
    """Return the port of an Internet address, or the path of a Unix one."""
    if isinstance(name, tuple):
        return int(name[1])
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name) or None
