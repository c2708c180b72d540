r"""Stores of resident blocks: those of a snapshot, and those behind a restored block. Compiled.

    root -- a -- b -- c         one event: a chain of one kind
                  \
                   d -- e       one event with parent b
    (gone) .... f -- g          an orphan: after all others, with its original parent
"""

from collections.abc import Iterator
from typing import Any, Final

from kv_pool.core.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from kv_pool.events.place_blocks import BlockRun, BlockSpan, Place, PlaceBlocks, find_position, unpack_tokens
from kv_pool.events.yield_timer import YieldTimer

MAX_TAIL_BLOCKS: Final = 1024
"""Maximum number of blocks announced again per store; further blocks are not announced again."""

NO_LIMIT: Final = 2**31 - 1


class Forest:
    """Runs of blocks, each of which is taken once."""

    def take(self, run: BlockRun) -> list[BlockRun] | None:
        """Take a run and return the runs that follow one of its blocks; None if it may not be taken."""
        raise NotImplementedError


def iter_stores(
    forest: Forest, place: Place, starts: list[BlockRun], max_blocks: int
) -> Iterator[BlockStored]:
    """Yield stores of these runs and of all that follow them, at most `max_blocks` per chain of runs.

    Parents come before children. Consumes `starts`.
    """
    while starts:
        following: BlockRun | None = starts.pop()
        chain: list[BlockRun] = []
        num_left = max_blocks
        while following is not None:
            run = following
            following = None
            children = forest.take(run)
            if children is None:
                break
            chain.append(run)
            num_left -= len(run)
            for child in children:
                if following is None and len(child) <= num_left and continues(run, child):
                    following = child
                else:
                    starts.append(child)
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


# ---- behind a restored block ---------------------------------------------------------------------


class Tails(Forest):
    """Fresh blocks of a place, and up to `MAX_TAIL_BLOCKS` blocks that follow them.

    Attributes:
        fresh: hashes that have just become resident.
        again: the other hashes taken.
    """

    def __init__(self, blocks: PlaceBlocks, fresh: list[Any]) -> None:
        self.blocks = blocks
        self.fresh: set[Any] = set(fresh)
        self.again: list[Any] = []
        self._taken: set[Any] = set()

    def find_run(self, block_hash: Any) -> BlockRun:
        """Return the run from a resident block to the end of its span; `take` shortens it."""
        span: BlockSpan = self.blocks.held.values[block_hash]
        return BlockRun(span, find_position(span, block_hash), span.end)

    def take(self, run: BlockRun) -> list[BlockRun] | None:
        span = run.span
        children: list[BlockRun] = []
        for position in range(run.first, run.end):
            block_hash = span.hashes[position]
            is_fresh = block_hash in self.fresh
            if (
                block_hash in self._taken
                or self.blocks.held.values.get(block_hash) is not span
                or (not is_fresh and len(self.again) == MAX_TAIL_BLOCKS)
            ):
                run.end = position
                break
            self._taken.add(block_hash)
            if not is_fresh:
                self.again.append(block_hash)
            known = self.blocks.children.get(block_hash)
            if known is not None:
                for child in known if type(known) is dict else (known,):
                    children.append(self.find_run(child))
        return children if len(run) else None


def announce_with_tails(blocks: PlaceBlocks, fresh: list[Any]) -> list[KVCacheEvent]:
    """Return one removal of the blocks after `fresh`, then stores of both; [] if no blocks follow.

        announced so far        a b c d stored, b removed      some readers cannot reach c and d any more
        b is stored again       c d removed, b c d stored      all readers reach all blocks

    Dynamo's indexer hides the blocks after a removed block; storing it again does not restore them.

    Args:
        blocks: the blocks of one place.
        fresh: hashes that have just become resident, parents first, and are not announced yet.

    Cost: O(blocks announced).
    """
    tails = Tails(blocks, fresh)
    place = blocks.place
    starts = [tails.find_run(block_hash) for block_hash in fresh[::-1]]
    stores = list(iter_stores(tails, place, starts, NO_LIMIT))
    if not tails.again:
        return []
    return [
        BlockRemoved(tails.again, place.medium, place.group_idx, place.locality, place.ownership),
        *stores,
    ]


# ---- snapshots -----------------------------------------------------------------------------------


class CopiedBlocks(Forest):
    """All blocks of a place as of one batch, from `PlaceBlocks.end_copy`.

    Attributes:
        roots, orphans: the runs without a parent, and those whose parent is not resident.
        children: hash -> the runs after it, in which a run that was not taken has its only place.
    """

    def __init__(self, place: Place, runs: list[BlockRun], max_blocks: int, yield_timer: YieldTimer) -> None:
        self.place = place
        self.roots: list[BlockRun] = []
        self.orphans: list[BlockRun] = []
        self.children: dict[Any, list[BlockRun]] = {}
        # Nothing here goes over all blocks in one call: compiled code does not yield in one.
        pending: dict[Any, list[BlockRun]] = {}
        for run in runs:
            for first in range(run.first, run.end, max_blocks):
                part = BlockRun(run.span, first, min(first + max_blocks, run.end))
                if part.parent is None:
                    self.roots.append(part)
                else:
                    pending.setdefault(part.parent, []).append(part)
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

    def take(self, run: BlockRun) -> list[BlockRun] | None:
        hashes = run.span.hashes[run.first : run.end]
        if self.children.keys().isdisjoint(hashes):
            return []
        return [child for block_hash in hashes for child in self.children.pop(block_hash, ())]


def iter_chunks(
    copies: list[tuple[Place, list[BlockRun]]], max_blocks: int, yield_timer: YieldTimer
) -> Iterator[list[KVCacheEvent]]:
    """Yield stores of all copied blocks, in lists of at most `max_blocks` blocks. Consumes the copies."""
    forests = [CopiedBlocks(place, runs, max_blocks, yield_timer) for place, runs in copies]
    chunk: list[KVCacheEvent] = []
    num_blocks = 0
    for event in iter_all(forests, max_blocks):
        yield_timer.yield_if_due()
        if num_blocks + len(event.block_hashes) > max_blocks:
            yield chunk
            chunk, num_blocks = [], 0
        chunk.append(event)
        num_blocks += len(event.block_hashes)
    if chunk:
        yield chunk


def iter_all(forests: list[CopiedBlocks], max_blocks: int) -> Iterator[BlockStored]:
    """Yield the blocks of all places: trees from their roots, then orphans, then all remaining blocks."""
    for forest in forests:
        yield from iter_stores(forest, forest.place, forest.roots, max_blocks)
    for forest in forests:
        yield from iter_stores(forest, forest.place, forest.orphans, max_blocks)
    for forest in forests:
        while forest.children:  # of hashes whose parents form a cycle: two prefixes have the same hash
            _, starts = forest.children.popitem()
            yield from iter_stores(forest, forest.place, starts, max_blocks)
