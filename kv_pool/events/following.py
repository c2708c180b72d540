"""`follow`: apply a subscriber's items to a mirror, which then matches the publisher's cache."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.stream_items import (
    BatchesLost,
    PublisherRestarted,
    ReceivedBatch,
    StreamItem,
    StreamSource,
)

_Id = str | Callable[[StreamSource], str]


def follow(mirror: PrefixMirror, items: Iterable[StreamItem], publisher_id: _Id) -> Iterator[StreamItem]:
    """Apply each item to the mirror, then yield it.

        for item in follow(mirror, subscriber, "engine-1"):
            ...                       # the mirror is up to date as of this item

        for item in follow(mirror, subscriber, lambda source: source.topic):
            ...                       # the same with a publisher of the mirror for each topic

    Several publishers of one subscriber may share an id: the mirror then has the blocks of all, and forgets
    them all when one restarts, is cleared, or loses batches.

    See `apply_item` for the effect of a loss.
    """
    for item in items:
        apply_item(mirror, item, publisher_id)
        yield item


async def follow_async(
    mirror: PrefixMirror, items: AsyncIterable[StreamItem], publisher_id: _Id
) -> AsyncIterator[StreamItem]:
    """Apply items as `follow` does, in an event loop: `async for item in follow_async(mirror, items, "a")`.

    Decoding and applying an item blocks the loop, for long if it is a large snapshot. If that matters,
    iterate over `follow` in a thread; the mirror's lookups take no lock.
    """
    async for item in items:
        apply_item(mirror, item, publisher_id)
        yield item


def apply_item(mirror: PrefixMirror, item: StreamItem, publisher_id: _Id) -> None:
    """Apply one item of a stream.

    After a loss or a restart the publisher's blocks are forgotten: a lost batch may have removed any of them.
    Until they are stored again, the mirror has fewer blocks than the publisher, but no wrong ones. A loss
    that is healed by a snapshot changes nothing: the snapshot begins with a clear. The blocks of a silent
    publisher are kept: the router decides whether to send it requests.
    """
    if not isinstance(publisher_id, str):
        publisher_id = publisher_id(item.source)
    match item:
        case ReceivedBatch():
            mirror.apply(publisher_id, item.batch.unread_events)
        case BatchesLost(is_healed=False) | PublisherRestarted():
            mirror.clear_publisher(publisher_id)
        case _:
            pass
