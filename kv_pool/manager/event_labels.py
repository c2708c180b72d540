"""`label_events`: add to a pool's events what only the manager knows of its groups."""

from collections.abc import Sequence

from kv_pool.core.kv_events import BlockStored, KVCacheEvent
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec


def label_events(events: list[KVCacheEvent], groups: Sequence[KVCacheSpec]) -> list[KVCacheEvent]:
    """Return the same events; each store now states its group's kind of attention, and its window."""
    for event in events:
        if not isinstance(event, BlockStored) or event.group_idx is None:
            continue
        if 0 <= event.group_idx < len(groups):
            spec = groups[event.group_idx]
            event.kv_cache_spec_kind = spec.kind
            event.kv_cache_spec_sliding_window = getattr(spec, "sliding_window", None)
    return events
