"""`ControlServer`: serve a running pool on a Unix socket that only its owner can open."""

import asyncio
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kv_pool.closing import Running
from kv_pool.control import messages
from kv_pool.control.socket_path import (
    get_default_folder,
    is_dead,
    lock_socket,
    make_folder,
    remove_dead_sockets,
    resolve_path,
)
from kv_pool.core.arguments import as_count
from kv_pool.errors import ControlError
from kv_pool.ids import NodeName
from kv_pool.reports.controlled_pool import ControlledPool
from kv_pool.reports.holds import explain_block, list_holds
from kv_pool.threads import Workers, start_thread

if TYPE_CHECKING:
    from kv_pool.control.live_node import LiveNode

_BACKLOG = 128


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
        guard: entered around each command that concerns the pool, such as a lock that the engine holds during
            a step. It keeps a compaction from running between the engine's reading and using block ids.
        timeout_s: seconds a client may take to send the rest of a command, or to read its reply.
        max_clients: maximum number of connections; further ones are refused.
    Raises:
        ControlError: the path cannot be a socket's.

    A server at a default path also removes the sockets of killed servers from that folder.

    A compaction changes block ids. The engine of the pool must update its tables (`on_moved`), or read the
    ids of its sequences again after each compaction.

    Pool commands run one at a time, under the guard. Node commands may wait for other nodes; they run in
    threads of their own, without the guard. A bad or incomplete command does not affect other clients; its
    error is the reply. See `messages` for the format.
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
        guard: AbstractContextManager[object] | None = None,
        timeout_s: float = 10.0,
        max_clients: int = 64,
    ) -> None:
        self.pool = pool
        self.path = resolve_path(path, node_name if node is None else node.migrator.name)
        self._why_no_node = why_no_node
        self._node = node
        self._tiers = tiers
        self._guard = nullcontext() if guard is None else guard
        self._timeout_s = timeout_s
        self._max_clients = as_count("max_clients", max_clients, 1)
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._thread: threading.Thread | None = None
        self._at_node = Workers("kv_pool control of the node", max_clients)
        self._inode = 0

    def start(self) -> None:
        """Start to listen; clients can connect as soon as this returns.

        Raises:
            ControlError: the server runs already, another server listens at the path, a file that is not a
                socket is there, or no socket can be created.
            OutOfThreadsError: the system cannot start a thread.
            In both cases nothing has changed, except that the folder may have been created.
        """
        if self._thread is not None:
            raise ControlError(f"this server already listens at {self.path}")
        listener = self._listen()
        with ExitStack() as on_failure:
            on_failure.callback(listener.close)
            on_failure.callback(self._remove_socket)
            try:
                self._loop = asyncio.new_event_loop()
            except OSError as error:  # such as no file descriptor for it
                raise ControlError(f"{self.path}: cannot serve there: {error}") from error
            on_failure.callback(self._end_loop)
            self._stopping = asyncio.Event()
            self._thread = start_thread("kv_pool control", self._run, listener)
            on_failure.pop_all()

    def _end_loop(self) -> None:
        """Close the loop. An interrupted start may have begun to run it: then its thread closes it."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._stopping.set)
        else:
            self._loop.close()

    def stop(self) -> None:
        """Finish the command that runs, close all connections and remove the socket.

        Do not call it while holding the guard: the running command may wait for it.
        """
        if self._thread is None:
            return
        self._remove_socket()
        self._loop.call_soon_threadsafe(self._stopping.set)
        # The server's own thread may drop the last reference to a pool.
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    # ---- the socket ------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        make_folder(self.path)
        if self.path.parent == get_default_folder():
            remove_dead_sockets()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as on_failure:
            on_failure.callback(listener.close)
            try:
                with lock_socket(self.path, self._timeout_s):
                    self._make_room()
                    listener.bind(os.fspath(self.path))
                    # Clients cannot connect before listen().
                    os.chmod(self.path, 0o600)
                    self._inode = self.path.lstat().st_ino
                    listener.listen(_BACKLOG)
                listener.setblocking(False)
            except OSError as error:
                raise ControlError(f"{self.path}: cannot listen there: {error.strerror}") from error
            on_failure.pop_all()
        return listener

    def _make_room(self) -> None:
        """Remove the socket of a dead server. Raises ControlError if anything else is at the path."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise ControlError(
                f"{self.path} is not a socket and was left unchanged; choose another path with --socket"
            )
        if is_dead(self.path, self._timeout_s):
            self.path.unlink()
            return
        raise ControlError(
            f"a pool is served at {self.path} already; stop its server, or choose another socket "
            "with --socket"
        )

    def _remove_socket(self) -> None:
        with suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_unix_server(
            self._serve_client, sock=listener, limit=messages.MAX_COMMAND_BYTES, backlog=_BACKLOG
        )
        await self._stopping.wait()
        server.close()
        for writer in self._clients.values():
            writer.transport.abort()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients[task] = writer
        # Makes drain() wait until the whole reply is sent, so that abort() below loses nothing.
        writer.transport.set_write_buffer_limits(0)
        try:
            if len(self._clients) > self._max_clients:
                raise ControlError(f"{self._max_clients} clients are already connected; try again later")
            while line := await self._read_line(reader):
                await self._send(writer, await self._answer(line))
        except ControlError as error:
            with suppress(OSError):
                await self._send(writer, messages.encode_error(error))
        except OSError:
            pass  # The client has disconnected, or does not read.
        finally:
            del self._clients[task]
            writer.transport.abort()

    async def _read_line(self, reader: asyncio.StreamReader) -> bytes:
        """Return the next command; b"" at the end of the stream.

        Raises:
            ControlError: the command is too long, or its rest does not arrive in time. The start of the next
                command is then unknown.
        """
        # The timeout applies within a command, not between two.
        first = await reader.read(1)
        if first in (b"", b"\n"):
            return first
        try:
            async with asyncio.timeout(self._timeout_s):
                return first + await reader.readline()
        except TimeoutError as error:
            raise ControlError(f"the rest of a command did not arrive within {self._timeout_s} s") from error
        except ValueError as error:
            raise ControlError(f"a command has at most {messages.MAX_COMMAND_BYTES} bytes") from error

    async def _send(self, writer: asyncio.StreamWriter, reply: bytes) -> None:
        async with asyncio.timeout(self._timeout_s):
            writer.write(reply)
            await writer.drain()

    async def _answer(self, line: bytes) -> bytes:
        try:
            command = messages.decode_command(line)
            if isinstance(command, messages.NodeCommand):
                done = self._at_node.submit(partial(self._carry_out_at_node, command))
                result = await asyncio.wrap_future(done)
            else:
                with self._guard:
                    result = self._carry_out(command)
            return messages.encode_result(result)
        except Exception as error:  # A pool's callback may raise anything; the server continues.
            return messages.encode_error(error)

    def _carry_out_at_node(self, command: messages.NodeCommand) -> msgspec.Struct:
        node = self._node
        if node is None:
            raise ControlError(
                f"the pool at {self.path} is not a node, so migration is not available: {self._why_no_node}"
            )
        match command:
            case messages.MigrateCommand():
                return node.migrate(**msgspec.structs.asdict(command))
            case messages.MigrationsCommand():
                return node.list_migrations(command.migration_id)
            case messages.CancelCommand():
                return node.cancel(command.migration_id)
            case _:
                return node.list_peers()

    def _carry_out(self, command: messages.Command) -> msgspec.Struct:
        match command:
            case messages.SequencesCommand():
                return self.pool.describe_sequences()
            case messages.HoldsCommand():
                with self.pool.lock:
                    if command.block_id is None:
                        return list_holds(self.pool.block_pool)
                    return explain_block(self.pool.block_pool, command.block_id)
            case messages.TiersCommand():
                if self._tiers is None:
                    raise ControlError(
                        f"the pool at {self.path} has no lower tiers; kv-pool serve adds them with "
                        "--host-tier BLOCKS and --disk-tier FOLDER, other engines with ControlServer(tiers=)"
                    )
                return self._tiers()
            case messages.StatsCommand():
                return self.pool.get_statistics()
            case messages.DefragCommand():
                return defragment(self.pool, command.max_moves, command.max_evictions)
            case _:
                return self.pool.get_layout()


def defragment(
    pool: ControlledPool[Any],
    max_moves: int | None,
    max_evictions: int,
    clock: Callable[[], float] = time.perf_counter,
) -> messages.DefragReport:
    """Compact the pool and return a report. Raises the errors of `GPUKVPool.defragment`."""
    before = pool.get_fragmentation_rate()
    started = clock()
    moved = pool.defragment(max_evictions=max_evictions, max_moves=max_moves)
    elapsed = clock() - started
    return messages.DefragReport(
        moved, elapsed * 1000, before, pool.get_fragmentation_rate(), pool.run_length
    )
