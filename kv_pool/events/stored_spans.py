"""A `BlockStored` in parts: the blocks from one position to another, as an event of their own."""

import msgspec

from kv_pool.core.kv_events import BlockStored
from kv_pool.events.resident_blocks import is_dense
from kv_pool.ids import ExternalBlockHash


def take_span(event: BlockStored, first: int, end: int, parent: ExternalBlockHash | None) -> BlockStored:
    """Blocks `[first, end)` of the event, after `parent`. The tokens are left out if they are not dense."""
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
    """The event, without tokens if they are those of other blocks, too."""
    if is_dense(event):
        return event
    return take_span(event, 0, len(event.block_hashes), event.parent_block_hash)


def take_positions(event: BlockStored, positions: list[int]) -> list[BlockStored]:
    """The blocks at these positions, ascending: one event for each run of neighbours.

    The event itself if all. The parent is the block before in the event, whether it is among those or not.
    """
    if len(positions) == len(event.block_hashes):
        return [event]
    parts: list[BlockStored] = []
    first = 0
    for index, position in enumerate(positions):
        if index + 1 == len(positions) or positions[index + 1] != position + 1:
            start = positions[first]
            parent = event.block_hashes[start - 1] if start else event.parent_block_hash
            parts.append(take_span(event, start, position + 1, parent))
            first = index + 1
    return parts


def split_repeats(event: BlockStored) -> list[BlockStored]:
    """Parts of the event in which no hash is twice, nor its own parent; the event itself if that is so.

    A hash that comes again has the parent that it had first, and one that is its own parent has none.
    """
    hashes = event.block_hashes
    parent = event.parent_block_hash
    if len(set(hashes)) == len(hashes) and (not hashes or hashes[0] != parent):
        return [event]
    parents: dict[ExternalBlockHash, ExternalBlockHash | None] = {}
    parts: list[BlockStored] = []
    first = 0
    part_parent: ExternalBlockHash | None = None
    seen: set[ExternalBlockHash] = set()
    for position, block_hash in enumerate(hashes):
        its_parent = parents.setdefault(block_hash, None if parent == block_hash else parent)
        if position == 0:
            part_parent = its_parent
        elif block_hash in seen:
            parts.append(take_span(event, first, position, part_parent))
            first, part_parent = position, its_parent
            seen.clear()
        seen.add(block_hash)
        parent = block_hash
    parts.append(take_span(event, first, len(hashes), part_parent))
    return parts
