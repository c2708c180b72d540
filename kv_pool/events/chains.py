r"""A snapshot's events: each resident block once, parents before children, chains as one event.

    root -- a -- b -- c         one event: a chain of one kind
                  \
                   d -- e       one event, whose parent is b
    (gone) .... f -- g          an orphan: after all others, with the parent it had
"""

from collections.abc import Iterator
from typing import Any

from kv_pool.core.kv_events import BlockStored, KVCacheEvent
from kv_pool.events.block_spans import BlockSpan, ResidentBlock, unpack_tokens
from kv_pool.events.pace import Pace
from kv_pool.events.place_blocks import Place
from kv_pool.events.resident_copy import Copies
from kv_pool.events.sharded_dict import ShardedDict, find_shard
from kv_pool.ids import ExternalBlockHash

STEPS_PER_LOOK_AT_THE_CLOCK = 32


def iter_chunks(copies: Copies, max_blocks: int, pace: Pace) -> Iterator[list[KVCacheEvent]]:
    """Events for all these blocks, in lists of at most `max_blocks` blocks. Uses the copies up.

    The memory of the copies goes back on the way.
    """
    all_chains = [Chains(place, blocks, max_blocks, pace) for place, blocks in copies.items()]
    copies.clear()
    chunk: list[KVCacheEvent] = []
    num_blocks = 0
    for event in iter_events(all_chains):
        if num_blocks + len(event.block_hashes) > max_blocks:
            yield chunk
            chunk, num_blocks = [], 0
        chunk.append(event)
        num_blocks += len(event.block_hashes)
    if chunk:
        yield chunk


def iter_events(all_chains: "list[Chains]") -> Iterator[BlockStored]:
    """The blocks of all places: roots and what hangs on them first, orphans next, what is left last."""
    for chains in all_chains:
        yield from chains.take(chains.roots)
    for chains in all_chains:
        yield from chains.take(chains.orphans)
    for chains in all_chains:
        # Hashes whose parents lead in a circle: two prefixes of one hash.
        for shard in chains.blocks.shards:
            while shard:
                yield from chains.take([next(iter(shard))])


class Chains:
    """The blocks of one place as a forest, to be taken apart into events of at most `max_blocks` blocks."""

    def __init__(self, place: Place, blocks: ShardedDict[ResidentBlock], max_blocks: int, pace: Pace) -> None:
        self.place = place
        self.blocks = blocks
        self.max_blocks = max_blocks
        self.pace = pace
        self.roots: list[ExternalBlockHash] = []
        self.orphans: list[ExternalBlockHash] = []
        self.first_children: ShardedDict[ExternalBlockHash] = ShardedDict()
        self.other_children: ShardedDict[list[ExternalBlockHash]] = ShardedDict()
        for shard in blocks.shards:
            for number, (block_hash, block) in enumerate(shard.items()):
                if block.parent is None:
                    self.roots.append(block_hash)
                elif not self.link(block_hash, block.parent):
                    self.orphans.append(block_hash)
                if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
                    pace.step()

    def link(self, block_hash: ExternalBlockHash, parent: ExternalBlockHash) -> bool:
        """Hang the block on its parent; False if that is not there."""
        number = find_shard(parent)
        if parent not in self.blocks.shards[number]:
            return False
        first_children = self.first_children.shards[number]
        if parent in first_children:
            self.other_children.shards[number].setdefault(parent, []).append(block_hash)
        else:
            first_children[parent] = block_hash
        return True

    def take(self, starts: list[ExternalBlockHash]) -> Iterator[BlockStored]:
        """Events for these blocks and all that hang on them, each block once. Uses `starts` up."""
        pending = starts
        all_blocks = self.blocks.shards
        first_children = self.first_children.shards
        other_children = self.other_children.shards
        while pending:
            start = pending.pop()
            run: list[ExternalBlockHash] = []
            run_blocks: list[ResidentBlock] = []
            following: ExternalBlockHash | None = start
            while following is not None:
                block_hash, following = following, None
                number = find_shard(block_hash)
                block = all_blocks[number].pop(block_hash, None)
                if block is None:  # the circle is closed
                    break
                run.append(block_hash)
                run_blocks.append(block)
                child = first_children[number].pop(block_hash, None)
                if child is not None:
                    if block_hash in other_children[number]:
                        pending += other_children[number].pop(block_hash)
                    child_block = all_blocks[find_shard(child)].get(child)
                    if len(run) < self.max_blocks and child_block and is_alike(block, child_block):
                        following = child
                    else:
                        pending.append(child)
                if len(run) % STEPS_PER_LOOK_AT_THE_CLOCK == 1:
                    self.pace.step()
            if run:
                yield make_event(self.place, run, run_blocks)


def is_alike(block: ResidentBlock, other: ResidentBlock) -> bool:
    """Return True if one event can tell of both."""
    span, next_span = block.span, other.span
    return span is next_span or (
        span.kind is next_span.kind
        and (span.tokens is None) == (next_span.tokens is None)
        and (span.lookahead_token_ids is None) == (next_span.lookahead_token_ids is None)
    )


def make_event(place: Place, hashes: list[ExternalBlockHash], blocks: list[ResidentBlock]) -> BlockStored:
    """Return one event for blocks that are alike, each the parent of the next."""
    first = blocks[0]
    kind = first.span.kind
    size = kind.block_size
    token_ids: list[int] = []
    extra_keys: list[Any] = []
    lookahead: list[Any] = []
    for span, start, end in list_runs(blocks):
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


def list_runs(blocks: list[ResidentBlock]) -> list[tuple[BlockSpan, int, int]]:
    """Return which blocks `[start, end)` of which spans these are."""
    runs: list[tuple[BlockSpan, int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] is block.span and runs[-1][2] == block.position:
            runs[-1] = block.span, runs[-1][1], block.position + 1
        else:
            runs.append((block.span, block.position, block.position + 1))
    return runs
