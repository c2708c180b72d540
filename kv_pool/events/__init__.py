"""The event stream: publisher, subscriber, mirror. Each name is imported when it is first used.

So that `import kv_pool.events` costs nothing, and what needs no sockets works without pyzmq.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_pool.events.batch import DecodedBatch, KVEventBatch, decode_batch, encode_batch
    from kv_pool.events.config import GroupSpec, PublisherConfig
    from kv_pool.events.curve_keys import CurveKeys
    from kv_pool.events.event_publisher import EventPublisher, NullEventPublisher, PublisherStatistics
    from kv_pool.events.following import apply_item, follow, follow_async
    from kv_pool.events.mirror import PrefixMirror, PublisherCounts
    from kv_pool.events.publisher import ZMQEventPublisher
    from kv_pool.events.stream_items import (
        BatchesLost,
        ContinuityCounts,
        PublisherRestarted,
        PublisherSilent,
        ReceivedBatch,
        StreamItem,
    )
    from kv_pool.events.stream_state import StreamState
    from kv_pool.events.subscriber import KVEventSubscriber, SubscriberStatistics

__all__ = [
    "BatchesLost",
    "ContinuityCounts",
    "CurveKeys",
    "DecodedBatch",
    "EventPublisher",
    "GroupSpec",
    "KVEventBatch",
    "KVEventSubscriber",
    "NullEventPublisher",
    "PrefixMirror",
    "PublisherConfig",
    "PublisherCounts",
    "PublisherRestarted",
    "PublisherSilent",
    "PublisherStatistics",
    "ReceivedBatch",
    "StreamItem",
    "StreamState",
    "SubscriberStatistics",
    "ZMQEventPublisher",
    "apply_item",
    "decode_batch",
    "encode_batch",
    "follow",
    "follow_async",
]

# No name may be a module's as well: an import of the module would put that in the name's place.
_NAMES_OF = {
    "batch": ("DecodedBatch", "KVEventBatch", "decode_batch", "encode_batch"),
    "config": ("GroupSpec", "PublisherConfig"),
    "curve_keys": ("CurveKeys",),
    "event_publisher": ("EventPublisher", "NullEventPublisher", "PublisherStatistics"),
    "following": ("apply_item", "follow", "follow_async"),
    "mirror": ("PrefixMirror", "PublisherCounts"),
    "publisher": ("ZMQEventPublisher",),
    "stream_items": (
        "BatchesLost",
        "ContinuityCounts",
        "PublisherRestarted",
        "PublisherSilent",
        "ReceivedBatch",
        "StreamItem",
    ),
    "stream_state": ("StreamState",),
    "subscriber": ("KVEventSubscriber", "SubscriberStatistics"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value  # so that the next time is an ordinary look-up
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
