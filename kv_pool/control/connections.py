"""`Connections`: the clients of one listening socket, served by uvicorn's HTTP within limits."""

import asyncio
import logging
import socket
from collections import Counter
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import cast

import h11
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kv_pool.control import messages
from kv_pool.control.network_port import NetworkPort
from kv_pool.errors import ControlError
from kv_pool.loggers import get_logger

_MAX_HEADER_BYTES = 8192
_SLICE_BYTES = 4096
_PAUSE_S = 0.1
_NEVER_S = 10**9

# uvicorn warns of each invalid request, with which clients could fill the log. They are counted instead.
_logger = logging.Logger(__package__, logging.ERROR)
_logger.parent = get_logger(__name__)


class Connections:
    """The connections of a Unix socket or of a `NetworkPort`.

    Args:
        application: answers the requests.
        refusals: counts what is refused, by reason: "clients" beyond the limit, a failed "handshake" of TLS,
            "garbage", "headers" that are too long, a "slow" request, and an "unread" answer.
        max_clients: maximum number of connections, TLS handshakes included.
        timeout_s: seconds for a request to arrive, and for its answer to be read. A connection through a
            network port is also closed if no request arrives for this time.
        listener: a socket that listens.

    Raises:
        ControlError: the certificate or the key cannot be used.
    """

    def __init__(
        self,
        application: ASGIApp,
        refusals: Counter[str],
        max_clients: int,
        timeout_s: float,
        listener: socket.socket,
        port: NetworkPort | None = None,
    ) -> None:
        self.refusals = refusals
        self.timeout_s = timeout_s
        self.port = port
        self.state = ServerState()
        # Logging is the host's: uvicorn changes its own loggers unless these arguments are as here.
        self.config = Config(
            cast("type[ASGIApp]", application),
            http=HttpConnection,
            ws="none",
            interface="asgi3",
            log_config=None,
            proxy_headers=False,
            workers=1,
            timeout_keep_alive=_NEVER_S,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            ssl_certfile=port.certificate if port else None,
            ssl_keyfile=port.key if port else None,
        )
        try:
            self.config.load()
        except OSError as error:
            raise ControlError(f"{port and port.certificate}: not usable for TLS: {error}") from error
        listener.setblocking(False)
        self._listener = listener
        self._max_clients = max_clients
        full = f"{max_clients} clients are already connected; try again later"
        self._full = b"" if self.config.ssl else _encode_refusal(503, full)
        self._clients: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Accept connections in the running loop until `close`."""
        self._loop = asyncio.get_running_loop()
        if self._listener.fileno() != -1:
            self._loop.add_reader(self._listener, self._accept)

    async def close(self) -> None:
        """Stop to listen, close all connections, and wait for the requests that run."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await asyncio.sleep(0)  # each accepted socket has a transport, which closes it, after this
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self.state.tasks, *self._clients, return_exceptions=True)

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # such as no file descriptor for it: the client waits
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_PAUSE_S, self.start)
            return
        if len(self._clients) < self._max_clients:
            served = self._loop.create_task(self._serve(client))
            self._clients.add(served)
            served.add_done_callback(self._clients.discard)
            return
        self.refusals["clients"] += 1
        with client, suppress(OSError):
            client.setblocking(False)
            client.send(self._full)

    async def _serve(self, client: socket.socket) -> None:
        """Serve a client until its connection is lost."""
        make = partial(HttpConnection, self, self._loop)
        limit = self.timeout_s if self.config.ssl else None
        try:
            transport, connection = await self._loop.connect_accepted_socket(
                make, client, ssl=self.config.ssl, ssl_handshake_timeout=limit, ssl_shutdown_timeout=limit
            )
        except OSError:
            self.refusals["handshake"] += 1
            return
        try:
            await connection.lost.wait()
        finally:
            transport.abort()


class HttpConnection(H11Protocol):
    """One connection: uvicorn's protocol with a deadline for each wait for the client.

    |<- request arrives ->|<- command runs ->|<- answer is read ->|<- next request ->|
          timeout_s             no limit            timeout_s        port: timeout_s
    """

    def __init__(self, owner: Connections, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(owner.config, owner.state, {"port": owner.port}, loop)
        self.logger = _logger
        self.access_log = False
        self._owner = owner
        self._awaited: str | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's
        super().connection_made(transport)
        transport.set_write_buffer_limits(1, 0)  # pause_writing() as soon as the client does not read
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()
        self._watch()

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"{") and self._is_idle():  # h11 would wait for headers
            self._refuse(
                400, "garbage", "this server speaks HTTP; a client of this version of kv_pool does, too"
            )
            return
        # h11 limits the headers that are incomplete: in slices no long ones arrive at once.
        for start in range(0, len(data), _SLICE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[start : start + _SLICE_BYTES])
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 could not parse."""
        if len(self.conn.trailing_data[0]) > _MAX_HEADER_BYTES:
            self._refuse(431, "headers", f"the headers have at most {_MAX_HEADER_BYTES} bytes")
        else:
            self._refuse(400, "garbage", msg)

    def _watch(self) -> None:
        """Start the deadline of what the client has to do now, unless it runs already."""
        awaited = self._find_awaited()
        if awaited == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited = awaited
        self._deadline = self.loop.call_later(self._owner.timeout_s, self._end) if awaited else None

    def _find_awaited(self) -> str | None:
        """Return the reason to count if the client does not do now what it has to; None if it may wait."""
        if self.flow.write_paused:
            return "unread"
        is_arriving = self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()
        may_wait = self._owner.port is None and self._is_idle()
        return "slow" if is_arriving and not may_wait else None

    def _is_idle(self) -> bool:
        """Return True between two requests, and before the first one."""
        return self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]

    def _end(self) -> None:
        is_next = self.cycle is not None and self._is_idle()
        if self._awaited == "slow" and not is_next:
            self._refuse(408, "slow", f"the request did not arrive within {self._owner.timeout_s} s")
            return
        self._owner.refusals["unread"] += self._awaited == "unread"
        self.transport.abort()

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Count a refusal, answer unless an answer has begun, and close the connection."""
        self._owner.refusals[reason] += 1
        if self.cycle is not None:
            self.cycle.disconnected = True  # its answer would follow this one
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        self.transport.write(_encode_refusal(status, message))
        self.transport.close()


def _encode_refusal(status: int, message: str) -> bytes:
    """Return the answer that refuses a request, after which the connection ends."""
    _, body = messages.encode_error(ControlError(message))
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
