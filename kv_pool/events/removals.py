"""Removals in fewer events: a pool tells of each hash by itself, and an event takes 64 bytes, a hash 9."""

from collections.abc import Iterable

import msgspec

from kv_pool.core.kv_events import BlockRemoved, KVCacheEvent
from kv_pool.events.resident_blocks import find_place
from kv_pool.ids import ExternalBlockHash


def coalesce_removals(events: Iterable[KVCacheEvent]) -> list[KVCacheEvent]:
    """The same events in the same order, but one for each run of removals from one place.

    No hash is twice in one event: where one is removed again, another event begins.
    """
    fewer: list[KVCacheEvent] = []
    run: list[BlockRemoved] = []
    seen: set[ExternalBlockHash] = set()
    for event in events:
        goes_on = (
            isinstance(event, BlockRemoved)
            and len(run) > 0
            and find_place(event) == find_place(run[0])
            and seen.isdisjoint(event.block_hashes)
        )
        if not goes_on:
            fewer += join(run)
            run.clear()
            seen.clear()
        if isinstance(event, BlockRemoved):
            run.append(event)
            seen.update(event.block_hashes)
        else:
            fewer.append(event)
    fewer += join(run)
    return fewer


def join(run: list[BlockRemoved]) -> list[BlockRemoved]:
    """Removals from one place as one event, itself if it is just one."""
    if len(run) < 2:
        return run[:]
    hashes = [block_hash for event in run for block_hash in event.block_hashes]
    return [msgspec.structs.replace(run[0], block_hashes=hashes)]
