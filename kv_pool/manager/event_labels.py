"""`label_events`: add to a pool's events what only a manager knows of its groups."""

from collections.abc import Sequence

from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.events.event_filter import add_kinds
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec


def list_labels(groups: Sequence[KVCacheSpec]) -> list[tuple[str, int | None]]:
    """Return the kind of attention and the window of each group, as events state them."""
    return [(spec.kind, getattr(spec, "sliding_window", None)) for spec in groups]


def label_events(pool: BlockPoolCore, labels: Sequence[tuple[str, int | None]]) -> list[KVCacheEvent]:
    """Take the pool's events; each store now states its group's kind of attention, and its window.

    Args:
        labels: see `list_labels`.
    """
    events = pool.take_events()
    add_kinds(events, labels)
    return events
