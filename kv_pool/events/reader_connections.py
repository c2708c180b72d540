"""`ReaderConnections`: the connections to a publisher's sockets: counts, limits and closes them."""

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
    """Counts the readers' connections, closes those beyond a limit at once, and others on demand.

    ZeroMQ frees what it holds for a reader when the connection ends, and has no call that ends one. It does
    report each connection's file descriptor, so this shuts the connection itself down. A descriptor may
    belong to another file by then: it is duplicated, and left alone unless it is a connection to one of the
    endpoints watched here.

    Args:
        max_readers: connections to all watched sockets together.

    Attributes:
        num_refused: connections that were closed since `max_readers` were open.

    Threads: one of its own, from `start` to `stop`; the other methods can be called from any.
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
        """Notice connections to a socket from now on. To be called before it is bound, and before `start`."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitors.append((one.get_monitor_socket(events), set()))

    def add_address(self, endpoint: str) -> None:
        """Name the endpoint of a watched socket, with its real port."""
        if address := _find_address(endpoint):
            self._addresses.add(address)

    def start(self) -> None:
        """Start to count connections.

        Raises:
            OutOfThreadsError: the system starts no more threads. Nothing has changed.
        """
        self._thread = start_thread("kv_pool event readers", self._run)

    def stop(self) -> None:
        """End the thread and close the monitors. The watched sockets may be closed before or after."""
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
        """Shut a connection down; False if the descriptor is not one of a connection to a watched socket."""
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
        """Close the first watched socket's connection with most bytes unsent; False if none has any."""
        with self._lock:
            descriptors = list(self._monitors[0][1])
        num_unsent, slowest = max(
            ((self._count_unsent(descriptor), descriptor) for descriptor in descriptors), default=(0, -1)
        )
        return num_unsent > 0 and self.cut(slowest)

    def _count_unsent(self, descriptor: int) -> int:
        """Count the bytes that the kernel holds for the other side."""
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
        """Duplicate the descriptor of a connection to one of the endpoints; None if it is something else."""
        try:
            connection = socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            return None
        names: list[Any] = []
        with suppress(OSError):
            # This end of connections that were accepted, the other end of those that were made.
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
        """Take note of what a monitor reports; False at its end."""
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
                "%d connections were refused so far, since %d readers are connected; max_readers admits more",
                self.num_refused,
                self.max_readers,
            )


def _find_address(endpoint: str) -> int | str | None:
    """Return what `_name_address` returns for connections to this endpoint; None for inproc."""
    if endpoint.startswith("ipc://"):
        return endpoint.removeprefix("ipc://")
    match = re.fullmatch(r"tcp://.*:(\d+)", endpoint)
    return int(match[1]) if match else None


def _name_address(name: Any) -> int | str | None:
    """Return the port of an Internet address, the path of a local one."""
    if isinstance(name, tuple):
        return int(name[1])
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name) or None
