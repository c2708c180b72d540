"""`ControlApplication`: what a running pool answers over HTTP."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Never, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kv_pool.control import messages
from kv_pool.control.commands import HISTORY_INTERVAL_S, PoolCommands
from kv_pool.control.health import Health
from kv_pool.control.network_port import NetworkPort
from kv_pool.control.page import load_page
from kv_pool.control.watch import Watch
from kv_pool.errors import ControlError
from kv_pool.threads import Workers

_MAP_CELLS = 2048
_VIEW_S = 0.5
_NODES_S = 5.0

_Result = TypeVar("_Result")


class ControlApplication:
    """The ASGI application of the control socket and of the network port.

    Args:
        refusals: counts the requests that are refused before a command, by reason.
        max_threads: maximum number of commands that wait for other nodes at the same time.
        web: whether `/` is the page.
    """

    def __init__(
        self, commands: PoolCommands, refusals: Counter[str], max_threads: int, *, web: bool
    ) -> None:
        self._commands = commands
        self._refusals = refusals
        numbers = {"pool": 1, "readings": 1, "health": 1, "node": max_threads}
        self._workers = {place: Workers(f"kv_pool control of the {place}", n) for place, n in numbers.items()}
        self._health = Health(commands, self._workers["health"])
        feeds = {"view": (partial(self._carry_out, messages.ViewCommand(_MAP_CELLS)), _VIEW_S)}
        if commands.node is not None:
            feeds["nodes"] = partial(self._carry_out, messages.PeersCommand()), _NODES_S
        self._watch = Watch(feeds)
        routes = [
            Route("/live", _reply(200, b'{"is_live":true}'), methods=["GET"]),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route(f"{messages.PATH}watch", self._watch, methods=["GET"]),
        ]
        for name, kind in messages.COMMANDS.items():
            routes.append(Route(messages.PATH + name, partial(self._command, name), methods=[kind.method]))
        if web:
            routes.append(Route("/", load_page(), methods=["GET"]))
        self._routes = Starlette(
            routes=routes,
            # Outside of Starlette's own, which would raise an unexpected error again for uvicorn to log.
            middleware=[Middleware(ExceptionMiddleware, handlers={Exception: _report})],
            exception_handlers={HTTPException: self._refuse_path},
        )
        self._routes.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. `scope["state"]["port"]` is the `NetworkPort` that it came through, or None."""
        request = Request(scope)
        port: NetworkPort | None = request.state.port
        refusal = port and port.find_refusal(request.method, scope["path"], request.headers)
        answer = self._refuse(*refusal) if refusal else self._routes
        await answer(scope, receive, send)

    async def keep_history(self) -> Never:
        """Note the state of the pool again and again."""
        monitor = self._commands.monitor
        while True:
            with suppress(Exception):  # such as of an interrupted pool: the history lacks this state
                monitor.history.append(await self._run("readings", monitor.read_state))
            await asyncio.sleep(HISTORY_INTERVAL_S)

    async def stop(self) -> None:
        """End the streams of views, and cancel the commands that have not started."""
        await self._watch.stop()
        for workers in self._workers.values():
            workers.stop()

    async def _command(self, name: str, request: Request) -> Response:
        arguments: bytes | dict[str, str] = dict(request.query_params)
        if request.method == "POST":
            arguments = b""
            async for part in request.stream():
                arguments += part
                if len(arguments) > messages.MAX_COMMAND_BYTES:
                    message = f"a command has at most {messages.MAX_COMMAND_BYTES} bytes"
                    return self._refuse(413, "body", message, {"connection": "close"})
        return _reply(200, await self._carry_out(messages.decode_command(name, arguments), request.receive))

    async def _ready(self, request: Request) -> Response:
        report = await self._health.get_report()
        return _reply(200 if report.is_ready else 503, messages.encode_result(report))

    async def _metrics(self, request: Request) -> Response:
        """Answer a scrape. `?names=` chooses the sets of names beside kv_pool's, see `PoolMetrics`."""
        names, accept = request.query_params.getlist("names"), request.headers.get("accept", "")

        def encode() -> tuple[str, bytes]:
            from kv_pool.metrics.prometheus import PoolMetrics, encode_metrics

            return encode_metrics(PoolMetrics([self._commands.sources], names or "vllm"), accept)

        content_type, body = await self._run("readings", encode, request.receive)
        return Response(body, media_type=content_type)

    async def _carry_out(self, command: messages.Command, receive: Receive | None = None) -> bytes:
        def carry_out() -> bytes:
            return messages.encode_result(self._commands.carry_out(command))

        return await self._run(command.place, carry_out, receive)

    async def _run(self, place: str, work: Callable[[], _Result], receive: Receive | None = None) -> _Result:
        """Return the result of work in a thread.

        Raises:
            ControlError: the server stops, or the client leaves, before the work begins; it is not done then.
        """
        result = asyncio.wrap_future(self._workers[place].submit(work))
        if receive is None:
            return await result
        leaving = asyncio.create_task(_cancel_when_left(result, receive))
        try:
            return await result
        except asyncio.CancelledError as error:
            raise ControlError("the server stops, or the client has left") from error
        finally:
            leaving.cancel()

    async def _refuse_path(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(messages.COMMANDS)
        message = (
            f"{request.method} {request.scope['path']}: {error.detail}; the commands under /v1/ are {known}"
        )
        return self._refuse(error.status_code, "path", message, error.headers)

    def _refuse(
        self, status: int, reason: str, message: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        self._refusals[reason] += 1
        _, body = messages.encode_error(ControlError(message))
        if status == 401:
            headers = {"www-authenticate": "Bearer"}
        return _reply(status, body, headers)


async def _cancel_when_left(result: asyncio.Future[Any], receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    result.cancel()


async def _report(request: Request, error: Exception) -> Response:
    """Return the answer for an error of a command. A pool's callback may raise anything."""
    return _reply(*messages.encode_error(error))


def _reply(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")
