"""`ControlApplication`: what a running pool answers over HTTP. `PoolCommands`: carry out its commands."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kv_pool.control import messages
from kv_pool.control.network_port import NetworkPort, Refusal
from kv_pool.errors import ControlError
from kv_pool.reports.allocation_monitor import WINDOWS_S, AllocationMonitor
from kv_pool.reports.controlled_pool import ControlledPool
from kv_pool.reports.holds import explain_block, list_holds
from kv_pool.threads import Workers

if TYPE_CHECKING:
    from kv_pool.control.live_node import LiveNode

HISTORY_INTERVAL_S = 3
"""Seconds between two states of the pool that the server keeps; 300 states are 15 minutes."""


class PoolCommands:
    """Carry out the commands of `messages` on a pool and its node; for the arguments see `ControlServer`.

    Attributes:
        at_pool: the thread of the commands about the pool, which run one at a time.
        at_node: the threads of the commands about the node, which may wait for other nodes.
    """

    def __init__(
        self,
        pool: ControlledPool[Any],
        path: Path,
        node: "LiveNode | None",
        why_no_node: str,
        tiers: Callable[[], messages.TierList] | None,
        guard: AbstractContextManager[object],
        max_threads: int,
    ) -> None:
        self.pool = pool
        self.node = node
        self.tiers = tiers
        self._path = path
        self._why_no_node = why_no_node
        self._guard = guard
        self._monitor = AllocationMonitor(pool, max(WINDOWS_S) // HISTORY_INTERVAL_S)
        self.at_pool = Workers("kv_pool control of the pool", 1)
        self.at_node = Workers("kv_pool control of the node", max_threads)

    async def run(self, command: messages.Command) -> bytes:
        """Carry out a command in a thread, and return the encoded result. Raises what the command raises."""
        workers = self.at_node if isinstance(command, messages.NodeCommand) else self.at_pool
        try:
            return await asyncio.wrap_future(workers.submit(partial(self._carry_out, command)))
        except asyncio.CancelledError as error:  # by `stop`, before it has started
            raise ControlError(f"the server at {self._path} stops") from error

    async def keep_history(self) -> Never:
        """Note the state of the pool again and again."""
        while True:
            with suppress(Exception):  # such as of an interrupted pool: the history lacks this state
                state = await asyncio.wrap_future(self.at_pool.submit(self._monitor.read_state))
                self._monitor.history.append(state)
            await asyncio.sleep(HISTORY_INTERVAL_S)

    def stop(self) -> None:
        """Cancel the commands that have not started."""
        self.at_pool.stop()
        self.at_node.stop()

    def _carry_out(self, command: messages.Command) -> bytes:
        if isinstance(command, messages.NodeCommand):
            return messages.encode_result(self._carry_out_at_node(command))
        if isinstance(command, messages.HistoryCommand):
            return messages.encode_result(self._monitor.summarize())
        with self._guard:
            result = self._carry_out_at_pool(command)
        return messages.encode_result(result)

    def _carry_out_at_node(self, command: messages.NodeCommand) -> msgspec.Struct:
        node = self.node
        if node is None:
            raise ControlError(
                f"the pool at {self._path} is not a node, so migration is not available: {self._why_no_node}"
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

    def _carry_out_at_pool(self, command: messages.Command) -> msgspec.Struct:
        match command:
            case messages.SequencesCommand():
                return self.pool.describe_sequences()
            case messages.HoldsCommand():
                with self.pool.lock:
                    if command.block_id is None:
                        return list_holds(self.pool.block_pool)
                    return explain_block(self.pool.block_pool, command.block_id)
            case messages.TiersCommand():
                if self.tiers is None:
                    raise ControlError(
                        f"the pool at {self._path} has no lower tiers; kv-pool serve adds them with "
                        "--host-tier BLOCKS and --disk-tier FOLDER, other engines with ControlServer(tiers=)"
                    )
                return self.tiers()
            case messages.StatsCommand():
                return self.pool.get_statistics()
            case messages.DefragCommand():
                return defragment(self.pool, command.max_moves, command.max_evictions)
            case _:
                return self.pool.get_layout()


class ControlApplication:
    """The ASGI application of the control socket and of the network port.

    Args:
        refusals: counts the requests that are refused before a command, by reason.
    """

    def __init__(self, commands: PoolCommands, refusals: Counter[str]) -> None:
        self._commands = commands
        self._refusals = refusals
        answers = {name: partial(self._answer, name) for name in messages.COMMANDS}
        self._routes = Starlette(
            routes=[
                Route(messages.PATH + name, answer, methods=[messages.COMMANDS[name].method])
                for name, answer in answers.items()
            ],
            exception_handlers={HTTPException: self._refuse_path},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. `scope["state"]["port"]` is the `NetworkPort` that it came through, or None."""
        request = Request(scope)
        port: NetworkPort | None = request.state.port
        refusal = port and port.find_refusal(request.method, request.url.path, request.headers)
        answer = self._refuse(refusal) if refusal else self._routes
        await answer(scope, receive, send)

    async def _answer(self, name: str, request: Request) -> Response:
        try:
            arguments = dict(request.query_params) if request.method != "POST" else await _read_body(request)
            if arguments is None:
                message = f"a command has at most {messages.MAX_COMMAND_BYTES} bytes"
                return self._refuse(Refusal(413, "body", message, {"connection": "close"}))
            return _reply(200, await self._commands.run(messages.decode_command(name, arguments)))
        except ClientDisconnect:
            return Response()
        except Exception as error:  # A pool's callback may raise anything; the server continues.
            return _reply(*messages.encode_error(error))

    async def _refuse_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(messages.COMMANDS)
        message = f"{request.method} {request.url.path}: {error.detail}; the commands under /v1/ are {known}"
        return self._refuse(Refusal(error.status_code, "path", message))

    def _refuse(self, refusal: Refusal) -> Response:
        self._refusals[refusal.reason] += 1
        _, body = messages.encode_error(ControlError(refusal.message))
        return _reply(refusal.status, body, refusal.headers)


async def _read_body(request: Request) -> bytes | None:
    """Return the body; None if it is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > messages.MAX_COMMAND_BYTES:
            return None
    return body


def _reply(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


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
