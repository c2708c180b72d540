"""`ResidentBlocks`: which hashes have blocks behind them, how many, and what was announced of them."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.events.sharded_dict import ShardedDict, find_shard
from kv_pool.ids import ExternalBlockHash


class Place(NamedTuple):
    """Where blocks are. The same hash in two places is two facts."""

    medium: str | None
    group_idx: int | None
    locality: str | None
    ownership: str | None


class BlockKind(NamedTuple):
    """What most blocks have in common; one object for all that do."""

    block_size: int
    lora_id: int | None
    lora_name: str | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None
    has_extra_keys: bool


# Without GC header, as the blocks of a pool, so that a collection does not visit each of a million.
class ResidentBlock(msgspec.Struct, gc=False):
    """A hash in one place, as the event announced it that brought its first copy.

    Attributes:
        num_copies: how many blocks carry the hash.
        parent: the hash before it in the sequence, resident or not; None at the start.
        tokens: the token ids, packed by `pack_tokens`; None where they are not kept, or were not told.
        extra_keys, lookahead_token_ids: the block's entries in the event.
    """

    num_copies: int
    parent: ExternalBlockHash | None
    kind: BlockKind
    tokens: bytes | None
    extra_keys: tuple[Any, ...] | None
    lookahead_token_ids: list[int] | None


class Change(NamedTuple):
    """A hash that became resident, or with None for a block, ceased to be."""

    place: Place
    block_hash: ExternalBlockHash
    block: ResidentBlock | None


class ResidentBlocks:
    """Counts copies by the stream of a pool, which tells of each block that gains or loses a hash.

    Attributes:
        places: the blocks by hash, for each place.
        changes: None, or what happened since someone put a list here, oldest first; None for a clearing.
    """

    def __init__(self, keeps_token_ids: bool) -> None:
        self.keeps_token_ids = keeps_token_ids
        self.places: dict[Place, ShardedDict[ResidentBlock]] = {}
        self.changes: list[Change | None] | None = None
        self._kinds: dict[BlockKind, BlockKind] = {}
        self._forgotten: list[dict[ExternalBlockHash, ResidentBlock]] = []

    def __len__(self) -> int:
        return sum(map(len, self.places.values()))

    def __iter__(self) -> Iterator[tuple[Place, ExternalBlockHash, ResidentBlock]]:
        for place, blocks in self.places.items():
            for shard in blocks.shards:
                for block_hash, block in shard.items():
                    yield place, block_hash, block

    def store(self, event: BlockStored) -> list[int]:
        """One copy more of each of the event's hashes. O(hashes).

        Returns:
            The positions in the event of those that had none before.
        """
        place = find_place(event)
        blocks = self.places.get(place)
        if blocks is None:
            blocks = self.places[place] = ShardedDict()
        size = event.block_size
        kind = BlockKind(
            size,
            event.lora_id,
            event.lora_name,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.extra_keys is not None,
        )
        kind = self._kinds.setdefault(kind, kind)
        tokens = pack_tokens(event.token_ids) if self.keeps_token_ids and is_dense(event) and size else None
        width = len(tokens) // len(event.block_hashes) if tokens else 0
        extra_keys = one_each(event.extra_keys, event)
        lookahead = one_each(event.lookahead_token_ids, event) if self.keeps_token_ids else None
        changes = self.changes
        first_copies: list[int] = []
        parent = event.parent_block_hash
        for position, block_hash in enumerate(event.block_hashes):
            shard = blocks.shards[find_shard(block_hash)]
            block = shard.get(block_hash)
            if block is None:
                block = ResidentBlock(
                    1,
                    None if parent == block_hash else parent,
                    kind,
                    tokens[position * width : (position + 1) * width] if tokens else None,
                    extra_keys[position] if extra_keys else None,
                    lookahead[position] if lookahead else None,
                )
                shard[block_hash] = block
                first_copies.append(position)
                if changes is not None:
                    changes.append(Change(place, block_hash, block))
            else:
                block.num_copies += 1
            parent = block_hash
        return first_copies

    def remove(self, event: BlockRemoved) -> list[ExternalBlockHash]:
        """One copy less of each of the event's hashes. O(hashes).

        Returns:
            Those that have none now, and those of which none was known: someone else may know of them.
        """
        place = find_place(event)
        blocks = self.places.get(place)
        gone: dict[ExternalBlockHash, None] = {}
        for block_hash in event.block_hashes:
            shard = None if blocks is None else blocks.shard(block_hash)
            block = None if shard is None else shard.get(block_hash)
            if shard is None or block is None:
                gone[block_hash] = None
            elif block.num_copies > 1:
                block.num_copies -= 1
            else:
                del shard[block_hash]
                gone[block_hash] = None
                if self.changes is not None:
                    self.changes.append(Change(place, block_hash, None))
        return list(gone)

    def clear(self) -> None:
        """No hash has a block, wherever. The memory goes back in pieces, by `drop_some`."""
        for blocks in self.places.values():
            self._forgotten.extend(shard for shard in blocks.shards if shard)
        self.places = {}
        self._kinds = {}
        if self.changes is not None:
            self.changes.append(None)

    def drop_some(self) -> None:
        """Give some memory of what was cleared back; microseconds."""
        del self._forgotten[-2:]


def find_place(event: BlockStored | BlockRemoved) -> Place:
    """The place that an event speaks of."""
    return Place(event.medium, event.group_idx, event.locality, event.ownership)


def is_dense(event: BlockStored) -> bool:
    """Are its tokens those of its blocks, and no others?"""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


def one_each(entries: list[Any] | None, event: BlockStored) -> list[Any] | None:
    """The entries if there is one for each hash of the event."""
    return entries if entries and len(entries) == len(event.block_hashes) else None


def pack_tokens(token_ids: Sequence[int]) -> bytes | None:
    """Token ids as 4 bytes each, or 8 where one needs that; None for what are no token ids."""
    for typecode in "IQ":
        try:
            return array(typecode, token_ids).tobytes()
        except OverflowError:
            continue
        except TypeError:
            break
    return None


def unpack_tokens(packed: bytes, num_tokens: int) -> list[int]:
    """What `pack_tokens` made of so many token ids."""
    unpacked = array("I" if len(packed) == num_tokens * array("I").itemsize else "Q")
    unpacked.frombytes(packed)
    return unpacked.tolist()
