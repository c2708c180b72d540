"""A snapshot: everything that is resident as events from which a reader that knows nothing can start.

    AllBlocksCleared, then each block once, parents before children:

    root -- a -- b -- c         one event: a chain of one kind
                  \
                   d -- e       one event, whose parent is b
    (gone) .... f -- g          an orphan: after all others, with the parent it had
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from kv_pool.core.kv_events import AllBlocksCleared, BlockStored, KVCacheEvent
from kv_pool.events.pace import Pace
from kv_pool.events.resident_blocks import Change, Place, ResidentBlock, ResidentBlocks, unpack_tokens
from kv_pool.events.sharded_dict import NUM_SHARDS, ShardedDict
from kv_pool.ids import ExternalBlockHash

MAX_BLOCKS_PER_CHUNK = 256
STEPS_PER_LOOK_AT_THE_CLOCK = 32

Copies = dict[Place, ShardedDict[ResidentBlock]]


def copy_places(resident: ResidentBlocks, lock: AbstractContextManager[object], pace: Pace) -> Copies:
    """A copy that is taken piece by piece, each under the lock; pieces are of different moments.

    Whoever changes `resident` holds the lock, too, and keeps its `changes` from before this begins.
    """
    copies: Copies = {}
    with lock:
        places = list(resident.places.items())
    for place, blocks in places:
        copy = copies[place] = ShardedDict()
        for number in range(NUM_SHARDS):
            with lock:
                copy.shards[number] = blocks.shards[number].copy()
            pace.step()
    return copies


def redo(copies: Copies, changes: Iterable[Change | None], pace: Pace) -> None:
    """Bring the copy to the moment of the last change. Doing again what a piece has seen is no harm."""
    for number, change in enumerate(changes):
        if change is None:
            for blocks in copies.values():
                for shard in blocks.shards:
                    shard.clear()
                    pace.step()
            copies.clear()
            continue
        place, block_hash, block = change
        if block is not None:
            copies.setdefault(place, ShardedDict()).shard(block_hash)[block_hash] = block
        elif place in copies:
            copies[place].shard(block_hash).pop(block_hash, None)
        if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
            pace.step()


def iter_chunks(copies: Copies, pace: Pace) -> Iterator[list[KVCacheEvent]]:
    """The events of a snapshot, at most `MAX_BLOCKS_PER_CHUNK` blocks at a time. Uses the copies up.

    The memory of the copies goes back on the way.
    """
    yield [AllBlocksCleared()]
    all_chains = [Chains(place, blocks, pace) for place, blocks in copies.items()]
    copies.clear()
    chunk: list[KVCacheEvent] = []
    num_blocks = 0
    for event in iter_events(all_chains):
        if num_blocks + len(event.block_hashes) > MAX_BLOCKS_PER_CHUNK:
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
    """The blocks of one place as a forest."""

    def __init__(self, place: Place, blocks: ShardedDict[ResidentBlock], pace: Pace) -> None:
        self.place = place
        self.blocks = blocks
        self.pace = pace
        self.roots: list[ExternalBlockHash] = []
        self.orphans: list[ExternalBlockHash] = []
        self.first_children: ShardedDict[ExternalBlockHash] = ShardedDict()
        self.other_children: ShardedDict[list[ExternalBlockHash]] = ShardedDict()
        for shard in blocks.shards:
            for number, (block_hash, block) in enumerate(shard.items()):
                self.link(block_hash, block.parent)
                if number % STEPS_PER_LOOK_AT_THE_CLOCK == 0:
                    pace.step()

    def link(self, block_hash: ExternalBlockHash, parent: ExternalBlockHash | None) -> None:
        if parent is None:
            self.roots.append(block_hash)
        elif parent not in self.blocks:
            self.orphans.append(block_hash)
        else:
            shard = self.first_children.shard(parent)
            if parent in shard:
                self.other_children.shard(parent).setdefault(parent, []).append(block_hash)
            else:
                shard[parent] = block_hash

    def take(self, starts: list[ExternalBlockHash]) -> Iterator[BlockStored]:
        """Events for these blocks and all that hang on them, each block once. Uses `starts` up."""
        pending = starts
        while pending:
            start = pending.pop()
            run: list[ExternalBlockHash] = []
            run_blocks: list[ResidentBlock] = []
            following: ExternalBlockHash | None = start
            while following is not None:
                block_hash, following = following, None
                block = self.blocks.shard(block_hash).pop(block_hash, None)
                if block is None:  # the circle is closed
                    break
                run.append(block_hash)
                run_blocks.append(block)
                child = self.first_children.shard(block_hash).pop(block_hash, None)
                if child is not None:
                    pending.extend(self.other_children.shard(block_hash).pop(block_hash, ()))
                    child_block = self.blocks.shard(child).get(child)
                    if len(run) < MAX_BLOCKS_PER_CHUNK and child_block and is_alike(block, child_block):
                        following = child
                    else:
                        pending.append(child)
                if len(run) % STEPS_PER_LOOK_AT_THE_CLOCK == 1:
                    self.pace.step()
            if run:
                yield make_event(self.place, run, run_blocks)


def is_alike(block: ResidentBlock, other: ResidentBlock) -> bool:
    """Can one event tell of both?"""
    if block.kind != other.kind or (block.lookahead_token_ids is None) != (other.lookahead_token_ids is None):
        return False
    if block.tokens is None or other.tokens is None:
        return block.tokens is other.tokens
    return len(block.tokens) == len(other.tokens)


def make_event(place: Place, hashes: list[ExternalBlockHash], blocks: list[ResidentBlock]) -> BlockStored:
    """One event for blocks that are alike, each the parent of the next."""
    first = blocks[0]
    kind = first.kind
    token_ids: list[int] = []
    if first.tokens is not None:
        packed = b"".join(block.tokens for block in blocks if block.tokens is not None)
        token_ids = unpack_tokens(packed, len(blocks) * kind.block_size)
    lookahead: list[list[int]] | None = None
    if first.lookahead_token_ids is not None:
        lookahead = [block.lookahead_token_ids or [] for block in blocks]
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=first.parent,
        token_ids=token_ids,
        block_size=kind.block_size,
        lora_id=kind.lora_id,
        medium=place.medium,
        lora_name=kind.lora_name,
        extra_keys=[block.extra_keys for block in blocks] if kind.has_extra_keys else None,
        group_idx=place.group_idx,
        kv_cache_spec_kind=kind.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=kind.kv_cache_spec_sliding_window,
        locality=place.locality,
        ownership=place.ownership,
        lookahead_token_ids=lookahead,
    )
