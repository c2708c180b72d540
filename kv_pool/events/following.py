"""`follow`: a subscriber's items applied to a mirror, which then holds what the publisher holds."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator

from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.stream_items import BatchesLost, PublisherRestarted, ReceivedBatch, StreamItem


def follow(mirror: PrefixMirror, items: Iterable[StreamItem], publisher_id: str) -> Iterator[StreamItem]:
    """Apply each item to the mirror and hand it on.

        for item in follow(mirror, subscriber, "engine-1"):
            ...                       # the mirror is up to date as of this item

    See `apply_item` for what a loss does.
    """
    for item in items:
        apply_item(mirror, item, publisher_id)
        yield item


async def follow_async(
    mirror: PrefixMirror, items: AsyncIterable[StreamItem], publisher_id: str
) -> AsyncIterator[StreamItem]:
    """`follow` in an event loop: `async for item in follow_async(mirror, subscriber, "engine-1")`.

    The loop stands still while an item is decoded and applied: for a snapshot of many blocks that is long.
    Where it must not, iterate over `follow` in a thread; the mirror's lookups take no lock.
    """
    async for item in items:
        apply_item(mirror, item, publisher_id)
        yield item


def apply_item(mirror: PrefixMirror, item: StreamItem, publisher_id: str) -> None:
    """Apply one item of a stream.

    After a loss and after a restart the publisher's blocks are forgotten: a lost batch may have removed any
    of them. The mirror then knows too few until they are stored again, but none that is not there. A loss
    that a snapshot makes up for changes nothing; the snapshot begins with a clear of its own. A silent
    publisher keeps its blocks: whether to send it requests is the router's to say.
    """
    match item:
        case ReceivedBatch():
            mirror.apply(publisher_id, item.batch.unread_events)
        case BatchesLost(is_healed=False) | PublisherRestarted():
            mirror.clear_publisher(publisher_id)
        case _:
            pass
