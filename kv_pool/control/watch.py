"""`Watch`: what changes in a pool as server-sent events, read once for all clients that watch."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from kv_pool.control.messages import encode_error

HEARTBEAT_S = 5.0

_END_S = 1.0
_HEARTBEAT = b": alive\n\n"
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]


class Feed(NamedTuple):
    """Events of one name.

    Attributes:
        read: returns the data of the next event, JSON in one line. Must not block the event loop. An error
            that it raises is the data of an event, as in `encode_error`.
        interval_s: seconds from the end of a reading to the next.
    """

    read: Callable[[], Awaitable[bytes]]
    interval_s: float


class Watch:
    """An ASGI application that sends each client the latest event of each feed.

    Feeds are read only while there are clients, and once for all of them. A client that is slower than a feed
    misses events: nothing is queued for it but what it is reading. A comment is sent if no event is due for
    5 s, such as while a reading waits for the pool.

    Args:
        feeds: by the name of their events.
    """

    def __init__(self, feeds: dict[str, Feed]) -> None:
        self._feeds = feeds
        self._latest: dict[str, bytes] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._clients: dict[asyncio.Task[None], asyncio.Event] = {}  # with what is set at news for the client
        self._is_stopped = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves or `stop` is called."""
        client, news = asyncio.current_task(), asyncio.Event()
        assert client is not None
        left = asyncio.create_task(wait_until_left(receive))
        left.add_done_callback(lambda _: news.set())
        self._clients[client] = news
        if not self._readers:
            self._readers = [asyncio.create_task(self._read(*feed)) for feed in self._feeds.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send_events(send, left, news)
            await send({"type": "http.response.body"})
        finally:
            left.cancel()
            del self._clients[client]
            if not self._clients:
                readers, self._readers = self._readers, []
                for reader in readers:
                    reader.cancel()
                self._latest.clear()

    async def stop(self) -> None:
        """End all streams; later ones end at once. Waits at most a second for clients to read the end."""
        self._is_stopped = True
        self._notify()
        if self._clients:
            await asyncio.wait(self._clients, timeout=_END_S)

    async def _send_events(self, send: Send, left: asyncio.Task[None], news: asyncio.Event) -> None:
        sent: dict[str, bytes] = {}
        while not left.done() and not self._is_stopped:
            news.clear()
            due = [event for name, event in self._latest.items() if sent.get(name) is not event]
            sent = self._latest.copy()
            body = b"".join(due) or _HEARTBEAT
            await send({"type": "http.response.body", "body": body, "more_body": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), HEARTBEAT_S)

    async def _read(self, name: str, feed: Feed) -> None:
        while True:
            try:
                data = await feed.read()
            except Exception as error:  # A pool's callback may raise anything; the next reading may succeed.
                _, data = encode_error(error)
            if asyncio.current_task() not in self._readers:  # ended while it was read
                return
            self._latest[name] = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
            self._notify()
            await asyncio.sleep(feed.interval_s)

    def _notify(self) -> None:
        for news in self._clients.values():
            news.set()


async def wait_until_left(receive: Receive) -> None:
    """Wait until the client has closed the connection, or the answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
