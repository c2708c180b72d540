"""`Watch`: what changes in a pool as server-sent events, read once for all clients that watch."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Never

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kv_pool.control.messages import encode_error

HEARTBEAT_S = 5.0

_END_S = 1.0
_HEARTBEAT = b": alive\n\n"
_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store"}


class Watch:
    """An ASGI application that sends each client the latest event of each feed.

    Feeds are read only while there are clients, and once for all of them. A client that is slower than a feed
    misses events: nothing is queued for it but what it is reading. A comment is sent if no event is due for
    5 s, such as while a reading waits for the pool.

    Args:
        feeds: by the name of their events, a function and the seconds from the end of its call to the next.
            It returns the data of the next event, JSON in one line, and must not block the event loop. An
            error that it raises is the data of an event, as in `encode_error`.
    """

    def __init__(self, feeds: Mapping[str, tuple[Callable[[], Awaitable[bytes]], float]]) -> None:
        self._feeds = feeds
        self._latest: dict[str, bytes] = {}
        self._news = asyncio.Event()  # of its own for each event
        self._readers: list[asyncio.Task[Never]] = []
        self._clients: set[asyncio.Task[object]] = set()
        self._is_stopped = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves or `stop` is called."""
        client = asyncio.current_task()
        assert client is not None
        self._clients.add(client)
        if not self._readers:
            self._readers = [
                asyncio.create_task(self._read(name, *feed)) for name, feed in self._feeds.items()
            ]
        try:
            await StreamingResponse(self._make_chunks(), headers=_HEADERS)(scope, receive, send)
        finally:
            self._clients.remove(client)
            if not self._clients:
                for reader in self._readers:
                    reader.cancel()
                self._readers = []
                self._latest.clear()

    async def stop(self) -> None:
        """End all streams; later ones end at once. Waits at most a second for clients to read the end."""
        self._is_stopped = True
        self._notify()
        if self._clients:
            await asyncio.wait(self._clients, timeout=_END_S)

    async def _make_chunks(self) -> AsyncIterator[bytes]:
        sent: dict[str, bytes] = {}
        while not self._is_stopped:
            news = self._news
            due = [event for name, event in self._latest.items() if sent.get(name) is not event]
            sent = self._latest.copy()
            yield b"".join(due) or _HEARTBEAT
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), HEARTBEAT_S)

    async def _read(self, name: str, read: Callable[[], Awaitable[bytes]], interval_s: float) -> Never:
        while True:
            try:
                data = await read()
            except Exception as error:  # A pool's callback may raise anything; the next reading may succeed.
                _, data = encode_error(error)
            self._latest[name] = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
            self._notify()
            await asyncio.sleep(interval_s)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
