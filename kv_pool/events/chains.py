r"""Stores of chains of resident blocks: of a snapshot, and after a block that is stored again. Compiled.

    root -- a -- b -- c         one event: a chain of one kind
                  \
                   d -- e       one event with parent b
    (gone) .... f -- g          an orphan: after all others, with its original parent
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from kv_pool.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.events.place_blocks import Place, PlaceBlocks
from kv_pool.events.spans import BlockRun, BlockSpan, find_position, unpack_tokens
from kv_pool.threads import YieldTimer

MAX_TAIL_BLOCKS: Final = 1024
"""Maximum number of blocks announced again per store; further blocks are not announced again."""

MAX_BLOCKS_PER_CHUNK: Final = 256
"""Maximum number of blocks in a store of resident blocks, and in a list of a snapshot."""


def announce_with_tails(blocks: PlaceBlocks, fresh: list[Any]) -> list[KVCacheEvent]:
    """Return one removal of the blocks after `fresh`, then stores of both; [] if no blocks follow.

        announced so far        a b c d stored, b removed      some readers cannot reach c and d any more
        b is stored again       c d removed, b c d stored      all readers reach all blocks

    Dynamo's indexer hides the blocks after a removed block; storing it again does not restore them. At most
    `MAX_TAIL_BLOCKS` blocks are announced again.

    Args:
        blocks: the blocks of one place.
        fresh: hashes that have just become resident, parents first, and are not announced yet.

    Cost: O(blocks announced).
    """
    spans = blocks.held.values
    is_fresh: set[Any] = set(fresh)
    taken: set[Any] = set()
    again: list[Any] = []
    runs: list[BlockRun] = []
    starts: list[Any] = fresh[::-1]
    while starts:
        block_hash = starts.pop()
        span: BlockSpan = spans[block_hash]
        first = find_position(span, block_hash)
        end = first
        for block_hash in span.hashes[first : span.end]:
            if block_hash in taken or spans.get(block_hash) is not span:
                break
            if block_hash not in is_fresh:
                if len(again) == MAX_TAIL_BLOCKS:
                    break
                again.append(block_hash)
            taken.add(block_hash)
            known = blocks.children.get(block_hash)
            if known is not None:
                starts.extend(known if type(known) is dict else (known,))
            end += 1
        if end > first:
            runs.append(BlockRun(span, first, end))
    if not again:
        return []
    return [BlockRemoved(again, *blocks.place), *iter_stores(blocks.place, runs)]


def iter_stores(place: Place, runs: Iterable[BlockRun]) -> Iterator[BlockStored]:
    """Yield stores of these runs, in their order; runs that continue each other are in one store."""
    chain: list[BlockRun] = []
    num_blocks = 0
    for run in runs:
        for first in range(run.first, run.end, MAX_BLOCKS_PER_CHUNK):
            part = BlockRun(run.span, first, min(first + MAX_BLOCKS_PER_CHUNK, run.end))
            num_blocks += len(part)
            if chain and (num_blocks > MAX_BLOCKS_PER_CHUNK or not continues(chain[-1], part)):
                yield make_store(place, chain)
                chain = []
                num_blocks = len(part)
            chain.append(part)
    if chain:
        yield make_store(place, chain)


def continues(run: BlockRun, child: BlockRun) -> bool:
    """Return True if one event can announce both runs."""
    span, next_span = run.span, child.span
    if child.parent != span.hashes[run.end - 1]:
        return False
    return span is next_span or (
        span.kind is next_span.kind
        and (span.tokens is None) == (next_span.tokens is None)
        and (span.lookahead_token_ids is None) == (next_span.lookahead_token_ids is None)
    )


def make_store(place: Place, chain: list[BlockRun]) -> BlockStored:
    """Return one event for runs each of which continues the one before it."""
    first = chain[0]
    kind = first.span.kind
    size = kind.block_size
    hashes: list[Any] = []
    token_ids: list[int] = []
    extra_keys: list[Any] = []
    lookahead: list[Any] = []
    for run in chain:
        span, start, end = run.span, run.first, run.end
        hashes += span.hashes[start:end]
        if span.tokens is not None:
            token_ids += unpack_tokens(span.tokens)[start * size : end * size]
        extra_keys += span.extra_keys[start:end] if span.extra_keys else [None] * (end - start)
        lookahead += span.lookahead_token_ids[start:end] if span.lookahead_token_ids else []
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=first.parent,
        token_ids=token_ids,
        block_size=size,
        lora_id=kind.lora_id,
        medium=place.medium,
        lora_name=kind.lora_name,
        extra_keys=extra_keys if kind.has_extra_keys else None,
        group_idx=place.group_idx,
        kv_cache_spec_kind=kind.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=kind.kv_cache_spec_sliding_window,
        locality=place.locality,
        ownership=place.ownership,
        lookahead_token_ids=lookahead if first.span.lookahead_token_ids is not None else None,
    )


# ---- snapshots -------------------------------------------------------------------------------------


class Forest:
    """Runs of blocks at one place, each of which is taken once.

    Attributes:
        roots, orphans: the runs without a parent, and those whose parent is in none of the runs.
        children: hash -> the runs after it, in which a run that was not taken has its only place.
    """

    def __init__(self, place: Place, runs: list[BlockRun], yield_timer: YieldTimer) -> None:
        """Consumes `runs`."""
        self.place = place
        self.roots: list[BlockRun] = []
        self.orphans: list[BlockRun] = []
        self.children: dict[Any, list[BlockRun]] = {}
        # Nothing here goes over all blocks in one call: compiled code does not yield in one.
        pending: dict[Any, list[BlockRun]] = {}
        for run in runs:
            if run.parent is None:
                self.roots.append(run)
            else:
                pending.setdefault(run.parent, []).append(run)
            yield_timer.yield_if_due()
        while runs:
            run = runs.pop()
            for block_hash in run.span.hashes[run.first : run.end]:
                following = pending.pop(block_hash, None)
                if following is not None:
                    self.children[block_hash] = following
            yield_timer.yield_if_due()
        while pending:
            self.orphans += pending.popitem()[1]
            yield_timer.yield_if_due()

    def iter_runs(self, starts: list[BlockRun]) -> Iterator[BlockRun]:
        """Yield these runs and all that follow them, parents first. Consumes `starts`."""
        while starts:
            run = starts.pop()
            hashes = run.span.hashes[run.first : run.end]
            if not self.children.keys().isdisjoint(hashes):
                for block_hash in hashes:
                    starts += self.children.pop(block_hash, ())
            yield run


def iter_all(forests: list[Forest]) -> Iterator[BlockStored]:
    """Yield the blocks of all places: trees from their roots, then orphans, then all remaining blocks."""
    for forest in forests:
        yield from iter_stores(forest.place, forest.iter_runs(forest.roots))
    for forest in forests:
        yield from iter_stores(forest.place, forest.iter_runs(forest.orphans))
    for forest in forests:
        while forest.children:  # of hashes whose parents form a cycle: two prefixes have the same hash
            yield from iter_stores(forest.place, forest.iter_runs(forest.children.popitem()[1]))


def iter_chunks(
    copies: list[tuple[Place, list[BlockRun]]], yield_timer: YieldTimer
) -> Iterator[list[KVCacheEvent]]:
    """Yield stores of all copied blocks, in lists of `MAX_BLOCKS_PER_CHUNK` blocks. Consumes the copies."""
    forests = [Forest(place, runs, yield_timer) for place, runs in copies]
    chunk: list[KVCacheEvent] = []
    num_blocks = 0
    for event in iter_all(forests):
        yield_timer.yield_if_due()
        if num_blocks + len(event.block_hashes) > MAX_BLOCKS_PER_CHUNK:
            yield chunk
            chunk, num_blocks = [], 0
        chunk.append(event)
        num_blocks += len(event.block_hashes)
    if chunk:
        yield chunk
