"""Splitting a `BlockStored` into events for ranges of its blocks."""

import msgspec

from kv_pool.core.kv_events import BlockStored
from kv_pool.ids import ExternalBlockHash


def is_dense(event: BlockStored) -> bool:
    """Return True if the event has exactly the tokens of its blocks."""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


def slice_event(event: BlockStored, first: int, end: int, parent: ExternalBlockHash | None) -> BlockStored:
    """Return an event for blocks `[first, end)`, after `parent`; without tokens if the event is not dense."""
    size = event.block_size
    return msgspec.structs.replace(
        event,
        block_hashes=event.block_hashes[first:end],
        parent_block_hash=parent,
        token_ids=event.token_ids[first * size : end * size] if is_dense(event) else [],
        extra_keys=event.extra_keys and event.extra_keys[first:end],
        lookahead_token_ids=event.lookahead_token_ids and event.lookahead_token_ids[first:end],
    )


def without_holes(event: BlockStored) -> BlockStored:
    """Return the event; without tokens if they do not match its blocks."""
    if is_dense(event):
        return event
    return slice_event(event, 0, len(event.block_hashes), event.parent_block_hash)


def slice_positions(event: BlockStored, positions: list[int]) -> list[BlockStored]:
    """Return one event per run of consecutive positions; `positions` are ascending.

    The event itself if all its positions are given. The parent of a part is the preceding block of the event,
    even if that block is not at one of the positions.
    """
    if len(positions) == len(event.block_hashes):
        return [event]
    hashes = event.block_hashes
    return [
        slice_event(event, first, end, hashes[first - 1] if first else event.parent_block_hash)
        for first, end in find_ranges(positions, len(hashes))
    ]


def split_repeats(event: BlockStored) -> list[BlockStored]:
    """Split an event with hashes so that in each part no hash occurs twice or is its own parent.

    Returns [event] if no split is needed. A repeated hash gets the parent of its first occurrence; a hash
    that is its own parent gets None.
    """
    hashes = event.block_hashes
    parent = event.parent_block_hash
    parts = find_distinct(hashes)
    if len(parts) == 1 and hashes[0] != parent:
        return [event]
    parents: dict[ExternalBlockHash, ExternalBlockHash | None] = {}
    for block_hash in hashes:
        parents.setdefault(block_hash, None if parent == block_hash else parent)
        parent = block_hash
    return [slice_event(event, first, end, parents[hashes[first]]) for first, end in parts]


def find_distinct(hashes: list[ExternalBlockHash]) -> list[tuple[int, int]]:
    """Split hashes into as few ranges `[first, end)` as possible, none of which has a hash twice."""
    if len(set(hashes)) == len(hashes):
        return [(0, len(hashes))]
    ranges: list[tuple[int, int]] = []
    first = 0
    seen: set[ExternalBlockHash] = set()
    for position, block_hash in enumerate(hashes):
        if block_hash in seen:
            ranges.append((first, position))
            first = position
            seen.clear()
        seen.add(block_hash)
    ranges.append((first, len(hashes)))
    return ranges


def find_ranges(positions: list[int], max_length: int) -> list[tuple[int, int]]:
    """Return the runs `[first, end)` of consecutive positions, which ascend, of at most this length."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position < ranges[-1][0] + max_length:
            ranges[-1] = ranges[-1][0], position + 1
        else:
            ranges.append((position, position + 1))
    return ranges
