"""The event stream: publisher, subscriber, snapshots, and an index of what engines hold."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.errors import EndpointError, EventStreamError, MissingDependencyError, PublisherClosedError
    from kv_pool.events.batch import DecodedBatch, KVEventBatch, decode_batch, encode_batch
    from kv_pool.events.config import GroupSpec, PublisherConfig
    from kv_pool.events.curve_keys import CurveKeys
    from kv_pool.events.event_publisher import EventPublisher, NullEventPublisher, PublisherStatistics
    from kv_pool.events.following import apply_item, follow, follow_async
    from kv_pool.events.mirror import MirrorCounts, PrefixMirror
    from kv_pool.events.publisher import ZMQEventPublisher
    from kv_pool.events.stream_items import (
        BatchesLost,
        PublisherRestarted,
        PublisherSilent,
        ReceivedBatch,
        StreamCounts,
        StreamItem,
        StreamSource,
    )
    from kv_pool.events.stream_state import StreamState
    from kv_pool.events.subscriber import KVEventSubscriber, SubscriberStatistics
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.errors": (
                "EventStreamError",
                "EndpointError",
                "PublisherClosedError",
                "MissingDependencyError",
            ),
            "kv_pool.events.batch": (
                "KVEventBatch",
                "DecodedBatch",
                "encode_batch",
                "decode_batch",
            ),
            "kv_pool.events.config": (
                "PublisherConfig",
                "GroupSpec",
            ),
            "kv_pool.events.curve_keys": ("CurveKeys",),
            "kv_pool.events.event_publisher": (
                "EventPublisher",
                "NullEventPublisher",
                "PublisherStatistics",
            ),
            "kv_pool.events.following": (
                "follow",
                "follow_async",
                "apply_item",
            ),
            "kv_pool.events.mirror": (
                "PrefixMirror",
                "MirrorCounts",
            ),
            "kv_pool.events.publisher": ("ZMQEventPublisher",),
            "kv_pool.events.stream_items": (
                "ReceivedBatch",
                "BatchesLost",
                "PublisherRestarted",
                "PublisherSilent",
                "StreamItem",
                "StreamSource",
                "StreamCounts",
            ),
            "kv_pool.events.stream_state": ("StreamState",),
            "kv_pool.events.subscriber": (
                "KVEventSubscriber",
                "SubscriberStatistics",
            ),
        },
    )

__all__ = [
    "PublisherConfig",
    "ZMQEventPublisher",
    "StreamState",
    "GroupSpec",
    "CurveKeys",
    "EventPublisher",
    "NullEventPublisher",
    "PublisherStatistics",
    "KVEventSubscriber",
    "SubscriberStatistics",
    "ReceivedBatch",
    "BatchesLost",
    "PublisherRestarted",
    "PublisherSilent",
    "StreamItem",
    "StreamSource",
    "StreamCounts",
    "PrefixMirror",
    "MirrorCounts",
    "follow",
    "follow_async",
    "apply_item",
    "KVEventBatch",
    "DecodedBatch",
    "encode_batch",
    "decode_batch",
    "EventStreamError",
    "EndpointError",
    "PublisherClosedError",
    "MissingDependencyError",
]
