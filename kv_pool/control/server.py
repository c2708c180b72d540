"""`ControlServer`: serve a running pool on a Unix socket that only its owner can open."""

import asyncio
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from kv_pool.closing import Running
from kv_pool.control import messages
from kv_pool.control.commands import PoolCommands
from kv_pool.control.network_port import NetworkPort
from kv_pool.control.socket_path import listen, resolve_path
from kv_pool.core.arguments import as_count
from kv_pool.errors import ControlError, MissingDependencyError, describe_install
from kv_pool.ids import NodeName
from kv_pool.metrics.block_ages import BlockAges
from kv_pool.reports.controlled_pool import ControlledPool
from kv_pool.reports.pool_reading import PoolSources
from kv_pool.threads import start_thread

if TYPE_CHECKING:
    from kv_pool.control.application import ControlApplication
    from kv_pool.control.connections import Connections
    from kv_pool.control.live_node import LiveNode
    from kv_pool.events.event_publisher import EventPublisher

_BACKLOG = 128
_THREAD = "kv_pool control"

_listeners: WeakSet[socket.socket] = WeakSet()


def _close_inherited() -> None:
    """Close the listeners in a forked child. Otherwise clients could connect after the server's death."""
    for listener in _listeners:
        listener.close()


os.register_at_fork(after_in_child=_close_inherited)


class ControlServer(Running):
    """A server of one pool for `kv-pool stats`, `defrag`, `layout` and so on, in its own thread.

        with ControlServer(pool):
            engine.run()

    Args:
        pool: a `GPUKVPool`, a `ControlledManager`, or another `ControlledPool`.
        path: path of the socket; None for `socket_path.get_default_path()` of the node, if there is one.
        node: the running node of the pool, for `kv-pool migrate` and `peers`; None if the pool is not a node.
        node_name: name in the default path of a pool that is not a node.
        why_no_node: end of the error message for `kv-pool migrate` if the pool is not a node.
        tiers: returns the report for `kv-pool tiers`, such as `LiveTiers.get_report`; None without tiers.
        publisher: the publisher of the pool's events, if there is one, for `/ready`.
        port: a TCP port on which the server answers, too; None for the socket only.
        web: serve a page for browsers at `url`; without a port, on a free port of this machine.
        guard: entered around each command that concerns the pool, such as a lock that the engine holds during
            a step. It keeps a compaction from running between the engine's reading and using block ids.
        timeout_s: seconds a client may take to send the rest of a command, or to read its reply.
        max_clients: maximum number of connections, of the socket and of the port each; further ones are
            refused.

    Attributes:
        url: where the network port answers, such as "http://127.0.0.1:9400/"; None without one.
        refusals: number of connections and requests that were refused before a command, by reason: see
            `Connections`; "body", "path", and those of `NetworkPort.find_refusal`.
    Raises:
        ControlError: the path cannot be a socket's.

    A server at a default path also removes the sockets of killed servers from that folder.

    A compaction changes block ids. The engine of the pool must update its tables (`on_moved`), or read the
    ids of its sequences again after each compaction.

    Pool commands run one at a time in a thread, under the guard; readings, views and metrics in another one,
    without it. Node commands may wait for other nodes; they run in threads of their own, without the guard. A
    command that has not begun when its client leaves is not carried out. A bad or incomplete command does not
    affect other clients; its error is the reply. See `messages` for the requests.
    """

    def __init__(
        self,
        pool: ControlledPool[Any],
        path: str | Path | None = None,
        *,
        node: "LiveNode | None" = None,
        node_name: NodeName | None = None,
        why_no_node: str = "start it with kv-pool serve --name, or pass a LiveNode to ControlServer",
        tiers: Callable[[], messages.TierList] | None = None,
        publisher: "EventPublisher | None" = None,
        port: NetworkPort | None = None,
        web: bool = False,
        guard: AbstractContextManager[object] | None = None,
        timeout_s: float = 10.0,
        max_clients: int = 64,
    ) -> None:
        self.pool = pool
        self.path = resolve_path(path, node_name if node is None else node.migrator.name)
        self.port = NetworkPort() if web and port is None else port
        self._web = web
        self.url: str | None = None
        self.refusals: Counter[str] = Counter()
        self._ages = BlockAges(lambda: pool.block_pool)
        sources = PoolSources(
            pool=pool,
            tiers=tiers,
            publisher=publisher,
            node=None if node is None else node.migrator,
            ages=self._ages.get_histograms,
            refusals=self.refusals,
        )
        held = nullcontext() if guard is None else guard
        self._commands = PoolCommands(pool, sources, self.path, held, why_no_node, node)
        self._timeout_s = timeout_s
        self._max_clients = as_count("max_clients", max_clients, 1)
        self._thread: threading.Thread | None = None
        self._inode = 0
        self._process_id = 0

    def start(self) -> None:
        """Start to listen; clients can connect as soon as this returns.

        Raises:
            ControlError: the server runs already, another server listens at the path, a file that is not a
                socket is there, or no socket can be created.
            OutOfThreadsError: the system cannot start a thread.
            MissingDependencyError: starlette or uvicorn is not installed.
            In all cases nothing has changed, except that the folder may have been created.
        """
        if self._thread is not None:
            raise ControlError(f"this server already listens at {self.path}")
        try:
            from kv_pool.control.application import ControlApplication
            from kv_pool.control.connections import Connections
        except ImportError as error:
            raise MissingDependencyError(
                f"serving a pool needs starlette and uvicorn: {describe_install('serve')}"
            ) from error
        application = ControlApplication(self._commands, self.refusals, self._max_clients, web=self._web)
        with ExitStack() as on_failure:
            try:
                listeners = [on_failure.enter_context(listen(self.path, self._timeout_s, _BACKLOG))]
                self._inode = self.path.lstat().st_ino
                on_failure.callback(self._remove_socket)
                self._loop = asyncio.new_event_loop()
            except OSError as error:  # such as no file descriptor for it
                raise ControlError(f"{self.path}: cannot serve there: {error.strerror}") from error
            on_failure.callback(self._end_loop)
            if self.port is not None:
                listeners.append(on_failure.enter_context(self.port.listen(_BACKLOG)))
                self.url = self.port.get_url(listeners[1])
            _listeners.update(listeners)
            served = [
                Connections(application, self.refusals, self._max_clients, self._timeout_s, listener, port)
                for listener, port in zip(listeners, (None, self.port), strict=False)
            ]
            self._stopping = asyncio.Event()
            self._process_id = os.getpid()
            self._thread = start_thread(_THREAD, self._run, application, served)
            on_failure.pop_all()

    def _end_loop(self) -> None:
        """Close the loop. An interrupted start may have begun to run it: then its thread closes it."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stopping.set)
        else:
            self._loop.close()

    def stop(self) -> None:
        """Finish the command that runs, close all connections and remove the socket.

        Do not call it while holding the guard: the running command may wait for it. In a forked child, which
        has inherited a server but not its thread, nothing happens.
        """
        thread = self._thread
        if thread is None or self._process_id != os.getpid():
            return
        self._remove_socket()
        with suppress(RuntimeError):  # another thread, or a signal's handler, has stopped it
            self._loop.call_soon_threadsafe(self._stopping.set)
        # The server's own threads may drop the last reference to a pool.
        if not threading.current_thread().name.startswith(_THREAD):
            thread.join()
        self._thread = None

    def _remove_socket(self) -> None:
        with suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self, application: "ControlApplication", served: "list[Connections]") -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(application, served))

    async def _serve(self, application: "ControlApplication", served: "list[Connections]") -> None:
        for one in served:
            one.start()
        history = asyncio.create_task(application.keep_history())
        with self._ages:
            await self._stopping.wait()
        history.cancel()
        await application.stop()
        await asyncio.gather(*(one.close() for one in served))
