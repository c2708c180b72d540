"""`Watch`: what changes in a pool as server-sent events, read once for all clients that watch."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kv_pool.threads import Workers

HEARTBEAT_S = 5.0

_HEARTBEAT = b": alive\n\n"
_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]

Message = MutableMapping[str, Any]


class Feed(NamedTuple):
    """Events of one name.

    Attributes:
        read: returns the data of the next event, JSON in one line. Called in a thread of its own; may block, but
            must not raise.
        interval_s: seconds between two readings.
    """

    read: Callable[[], bytes]
    interval_s: float


class Watch:
    """An ASGI application that sends each client the latest event of each feed.

    Feeds are read only while there are clients, and once for all of them. A client that is slower than a feed
    misses events; nothing is queued for it but the event that it is reading. One that does not read for `timeout_s`
    is disconnected. While no event is due or a reading waits for the pool, a comment is sent every 5 s.

    Args:
        feeds: by the name of their events.
    """

    def __init__(self, feeds: dict[str, Feed], *, timeout_s: float = 10.0) -> None:
        self._feeds = feeds
        self._timeout_s = timeout_s
        self._latest: dict[str, bytes] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._threads = Workers("kv_pool watch", len(feeds))
        self._num_clients = 0
        self._is_stopped = False
        self._news: asyncio.Future[None] | None = None

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Send events until the client leaves or `stop` is called."""
        left = asyncio.create_task(_wait_until_left(receive))
        self._num_clients += 1
        if self._num_clients == 1:
            self._readers = [asyncio.create_task(self._read(*feed)) for feed in self._feeds.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send_events(left, partial(self._send, send))
        finally:
            left.cancel()
            self._num_clients -= 1
            if not self._num_clients:
                for reader in self._readers:
                    reader.cancel()
                self._latest.clear()

    def stop(self) -> None:
        """End all responses; later ones end at once. Call it in the thread of the event loop."""
        self._is_stopped = True
        self._notify()
        self._threads.stop()

    async def _send_events(
        self, left: asyncio.Task[None], send: Callable[[bytes, bool], Awaitable[None]]
    ) -> None:
        sent: dict[str, bytes] = {}
        while not left.done() and not self._is_stopped:
            news = self._get_news()
            due = [event for name, event in self._latest.items() if sent.get(name) is not event]
            sent = self._latest.copy()
            await send(b"".join(due) or _HEARTBEAT, True)
            await asyncio.wait({left, news}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        await send(b"", False)

    async def _send(self, send: Callable[[Message], Awaitable[None]], body: bytes, has_more: bool) -> None:
        async with asyncio.timeout(self._timeout_s):
            await send({"type": "http.response.body", "body": body, "more_body": has_more})

    async def _read(self, name: str, feed: Feed) -> None:
        while True:
            data = await asyncio.wrap_future(self._threads.submit(feed.read))
            self._latest[name] = b"event: %b\ndata: %b\n\n" % (name.encode(), data)
            self._notify()
            await asyncio.sleep(feed.interval_s)

    def _get_news(self) -> asyncio.Future[None]:
        """Return what becomes done at the next event."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def _notify(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


async def _wait_until_left(receive: Callable[[], Awaitable[Message]]) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
