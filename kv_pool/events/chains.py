r"""The events of a snapshot: each resident block once, parents before children, one event per chain.

    root -- a -- b -- c         one event: a chain of one kind
                  \
                   d -- e       one event with parent b
    (gone) .... f -- g          an orphan: after all others, with its original parent
"""

from collections.abc import Iterator
from typing import Any

from kv_pool.core.kv_events import BlockStored, KVCacheEvent
from kv_pool.events.block_spans import BlockSpan, ResidentBlock, unpack_tokens
from kv_pool.events.place_blocks import Place
from kv_pool.events.resident_copy import Copies, ShardedDict
from kv_pool.events.yield_timer import YieldTimer
from kv_pool.ids import ExternalBlockHash

STEPS_PER_LOOK_AT_THE_CLOCK = 32


def iter_chunks(copies: Copies, max_blocks: int, yield_timer: YieldTimer) -> Iterator[list[KVCacheEvent]]:
    """Yield events for all these blocks, in lists of at most `max_blocks` blocks.

    Consumes `copies`, and frees their memory along the way.
    """
    all_chains = [Chains(place, blocks, max_blocks, yield_timer) for place, blocks in copies.items()]
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
    """Yield the blocks of all places: trees from their roots, then orphans, then all remaining blocks."""
    for chains in all_chains:
        yield from chains.take(chains.roots)
    for chains in all_chains:
        yield from chains.take(chains.orphans)
    for chains in all_chains:
        # Hashes whose parents form a cycle: two prefixes have the same hash.
        for shard in chains.blocks.shards:
            while shard:
                yield from chains.take([next(iter(shard))])


class Chains:
    """The blocks of one place as a forest, which `take` splits into events of at most `max_blocks` blocks.

    Attributes:
        roots, orphans: the blocks without a parent, and those whose parent is not resident.
        children: hash -> the blocks after it that are in other spans.
    """

    def __init__(
        self, place: Place, blocks: ShardedDict[ResidentBlock], max_blocks: int, yield_timer: YieldTimer
    ) -> None:
        self.place = place
        self.blocks = blocks
        self.max_blocks = max_blocks
        self.yield_timer = yield_timer
        self.roots: list[ExternalBlockHash] = []
        self.orphans: list[ExternalBlockHash] = []
        self.children: ShardedDict[list[ExternalBlockHash]] = ShardedDict()
        for shard in blocks.shards:
            for number, (block_hash, block) in enumerate(shard.items()):
                if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
                    yield_timer.yield_if_due()
                parent = block.parent
                if parent is None:
                    self.roots.append(block_hash)
                    continue
                before = blocks.shard(parent).get(parent)
                if before is None:
                    self.orphans.append(block_hash)
                elif before.span is not block.span:
                    self.children.shard(parent).setdefault(parent, []).append(block_hash)

    def take(self, starts: list[ExternalBlockHash]) -> Iterator[BlockStored]:
        """Yield events for these blocks and their descendants, each block once. Consumes `starts`."""
        pending = starts
        while pending:
            run: list[ExternalBlockHash] = []
            run_blocks: list[ResidentBlock] = []
            following: ExternalBlockHash | None = pending.pop()
            while following is not None:
                block_hash, following = following, None
                block = self.blocks.shard(block_hash).pop(block_hash, None)
                if block is None:  # a cycle ends here
                    break
                run.append(block_hash)
                run_blocks.append(block)
                for child in self.list_children(block_hash, block):
                    child_block = self.blocks.shard(child).get(child)
                    is_next = following is None and len(run) < self.max_blocks
                    if is_next and child_block and is_alike(block, child_block):
                        following = child
                    else:
                        pending.append(child)
                if len(run) % STEPS_PER_LOOK_AT_THE_CLOCK == 1:
                    self.yield_timer.yield_if_due()
            if run:
                yield make_event(self.place, run, run_blocks)

    def list_children(self, block_hash: ExternalBlockHash, block: ResidentBlock) -> list[ExternalBlockHash]:
        """Return the blocks after a block, that of the same span first."""
        children = self.children.shard(block_hash).pop(block_hash, [])
        hashes = block.span.hashes
        if block.position + 1 < len(hashes):
            following = hashes[block.position + 1]
            block_after = self.blocks.shard(following).get(following)
            if block_after is not None and block_after.span is block.span:
                children.insert(0, following)
        return children


def is_alike(block: ResidentBlock, other: ResidentBlock) -> bool:
    """Return True if one event can announce both blocks."""
    span, next_span = block.span, other.span
    return span is next_span or (
        span.kind is next_span.kind
        and (span.tokens is None) == (next_span.tokens is None)
        and (span.lookahead_token_ids is None) == (next_span.lookahead_token_ids is None)
    )


def make_event(place: Place, hashes: list[ExternalBlockHash], blocks: list[ResidentBlock]) -> BlockStored:
    """Return one event for blocks that are alike (`is_alike`), each the parent of the next."""
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
    """Group blocks into runs `(span, start, end)` of consecutive positions."""
    runs: list[tuple[BlockSpan, int, int]] = []
    for block in blocks:
        if runs and runs[-1][0] is block.span and runs[-1][2] == block.position:
            runs[-1] = block.span, runs[-1][1], block.position + 1
        else:
            runs.append((block.span, block.position, block.position + 1))
    return runs
