"""`ResidentBlocks`: which hashes have blocks, how many, and what was announced of them."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from mypy_extensions import i32, mypyc_attr

from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.events.sharded_dict import NUM_SHARDS, ShardedDict
from kv_pool.ids import ExternalBlockHash

# Positions of fields in the tuple that `msgspec.structs.astuple` makes of a `BlockStored`. Compiled code gets
# all of them by that call in the time that two take by name.
HASHES: Final = 0
PARENT: Final = 1
TOKEN_IDS: Final = 2
BLOCK_SIZE: Final = 3
LORA_ID: Final = 4
MEDIUM: Final = 5
LORA_NAME: Final = 6
EXTRA_KEYS: Final = 7
GROUP_IDX: Final = 8
SPEC_KIND: Final = 9
SLIDING_WINDOW: Final = 10
LOCALITY: Final = 11
OWNERSHIP: Final = 12
LOOKAHEAD: Final = 14


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


Children = ExternalBlockHash | dict[ExternalBlockHash, None]
"""Resident blocks with one parent: the hash of the only one, or the hashes of several."""


# Compiled, without a GC header, as the blocks of a pool: a collection does not visit each of a million.
@mypyc_attr(acyclic=True)
class ResidentBlock:
    """A hash in one place, as the event announced it that brought its first copy.

    Attributes:
        num_copies: how many blocks carry the hash.
        parent: the hash before it in the sequence, resident or not; None at the start.
        tokens: the token ids, packed by `pack_tokens`; None where they are not kept, or were not given.
        extra_keys, lookahead_token_ids: the block's entries in the event.
        children: the resident blocks whose parent it is; None without any.
    """

    __slots__ = (
        "children",
        "extra_keys",
        "kind",
        "lookahead_token_ids",
        "num_copies",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        parent: ExternalBlockHash | None,
        kind: BlockKind,
        tokens: bytes | None,
        extra_keys: tuple[Any, ...] | None,
        lookahead_token_ids: list[int] | None,
    ) -> None:
        self.num_copies: i32 = 1
        self.parent: Any = parent
        self.kind: Any = kind
        self.tokens: Any = tokens
        self.extra_keys: Any = extra_keys
        self.lookahead_token_ids: Any = lookahead_token_ids
        self.children: Any = None


class Change(NamedTuple):
    """A hash that became resident, or with None for a block, ceased to be."""

    place: Place
    block_hash: ExternalBlockHash
    block: ResidentBlock | None


class PlaceBlocks(ShardedDict[ResidentBlock]):
    """The blocks of one place by hash.

    Attributes:
        place: where they are.
        tails: of each hash that is not resident, but the parent of blocks that are, these blocks.
    """

    __slots__ = ("place", "tails")

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self.tails: dict[Any, Children] = {}


class ResidentBlocks:
    """Counts copies by the stream of a pool, which has an event for each block that gains or loses a hash.

    Attributes:
        places: the blocks by hash, for each place.
        changes: None, or what happened since a list was put here, oldest first; None for a clearing.
        has_tails: the last `store` brought a hash that resident blocks have for their parent.
    """

    def __init__(self, keeps_token_ids: bool) -> None:
        self.keeps_token_ids = keeps_token_ids
        self.places: dict[Place, PlaceBlocks] = {}
        self.changes: list[Change | None] | None = None
        self.has_tails = False
        self._kinds: dict[BlockKind, BlockKind] = {}
        self._forgotten: list[dict[Any, ResidentBlock]] = []
        # Most events have the place and the kind of the one before.
        self._last_blocks: PlaceBlocks | None = None
        self._last_medium: Any = None
        self._last_group_idx: Any = None
        self._last_locality: Any = None
        self._last_ownership: Any = None
        self._last_kind: BlockKind | None = None
        self._last_lora_id: Any = None
        self._last_lora_name: Any = None
        self._last_spec_kind: Any = None
        self._last_window: Any = None
        self._last_block_size: Any = None
        self._last_has_extra_keys = False
        # The parent of the block that was removed last, if it is resident: most often it is the next to go.
        self._next_blocks: PlaceBlocks | None = None
        self._next_hash: Any = None
        self._next_block: ResidentBlock | None = None

    def __len__(self) -> int:
        return sum(map(len, self.places.values()))

    def __iter__(self) -> Iterator[tuple[Place, ExternalBlockHash, ResidentBlock]]:
        for place, blocks in self.places.items():
            for shard in blocks.shards:
                for block_hash, block in shard.items():
                    yield place, block_hash, block

    def find_blocks(self, medium: Any, group_idx: Any, locality: Any, ownership: Any) -> PlaceBlocks:
        """Return the blocks of a place, which is added if it is new."""
        blocks = self._last_blocks
        if (
            blocks is not None
            and medium is self._last_medium
            and group_idx is self._last_group_idx
            and locality is self._last_locality
            and ownership is self._last_ownership
        ):
            return blocks
        place = Place(medium, group_idx, locality, ownership)
        blocks = self.places.get(place)
        if blocks is None:
            blocks = self.places[place] = PlaceBlocks(place)
        self._last_blocks = blocks
        self._last_medium = medium
        self._last_group_idx = group_idx
        self._last_locality = locality
        self._last_ownership = ownership
        return blocks

    def find_stored(self, fields: tuple[Any, ...]) -> PlaceBlocks:
        """Return the blocks of the place of a `BlockStored`, of which these are the fields."""
        return self.find_blocks(fields[MEDIUM], fields[GROUP_IDX], fields[LOCALITY], fields[OWNERSHIP])

    def _find_kind(self, fields: tuple[Any, ...]) -> BlockKind:
        """Return the kind of an event's blocks, one object for all that are equal."""
        last = self._last_kind
        block_size: Any = fields[BLOCK_SIZE]
        lora_id: Any = fields[LORA_ID]
        lora_name: Any = fields[LORA_NAME]
        spec_kind: Any = fields[SPEC_KIND]
        window: Any = fields[SLIDING_WINDOW]
        has_extra_keys = fields[EXTRA_KEYS] is not None
        if (
            last is not None
            and block_size is self._last_block_size
            and lora_id is self._last_lora_id
            and lora_name is self._last_lora_name
            and spec_kind is self._last_spec_kind
            and window is self._last_window
            and has_extra_keys == self._last_has_extra_keys
        ):
            return last
        kind = BlockKind(block_size, lora_id, lora_name, spec_kind, window, has_extra_keys)
        kind = self._kinds.setdefault(kind, kind)
        self._last_kind = kind
        self._last_block_size = block_size
        self._last_lora_id = lora_id
        self._last_lora_name = lora_name
        self._last_spec_kind = spec_kind
        self._last_window = window
        self._last_has_extra_keys = has_extra_keys
        return kind

    def store(self, blocks: PlaceBlocks, fields: tuple[Any, ...]) -> list[int]:
        """Add one copy of each hash of a `BlockStored`. O(hashes).

        Args:
            blocks: those of the event's place.
            fields: those of the event, by `astuple`.
        Returns:
            The positions in the event of those that had no copy before.
        """
        kind = self._find_kind(fields)
        hashes: list[Any] = fields[HASHES]
        tokens: bytes | None = None
        lookahead: list[Any] | None = None
        if self.keeps_token_ids:
            block_size = fields[BLOCK_SIZE]
            if block_size and len(fields[TOKEN_IDS]) == len(hashes) * block_size:
                tokens = pack_tokens(fields[TOKEN_IDS])
            lookahead = one_each(fields[LOOKAHEAD], len(hashes))
        width = len(tokens) // len(hashes) if tokens else 0
        extra_keys: list[Any] | None = one_each(fields[EXTRA_KEYS], len(hashes))
        shards: list[dict[Any, ResidentBlock]] = blocks.shards
        tails = blocks.tails
        changes = self.changes
        first_copies: list[int] = []
        parent: Any = fields[PARENT]
        previous: ResidentBlock | None = None
        self.has_tails = False
        for position, block_hash in enumerate(hashes):
            shard = shards[hash(block_hash) % NUM_SHARDS]
            block = shard.get(block_hash)
            if block is not None:
                block.num_copies += 1
            else:
                its_parent = parent
                if parent is not None and parent == block_hash:
                    its_parent = None
                block = ResidentBlock(
                    its_parent,
                    kind,
                    tokens[position * width : (position + 1) * width] if tokens is not None else None,
                    extra_keys[position] if extra_keys is not None else None,
                    lookahead[position] if lookahead is not None else None,
                )
                shard[block_hash] = block
                first_copies.append(position)
                if its_parent is not None:
                    if previous is None:
                        previous = shards[hash(parent) % NUM_SHARDS].get(parent)
                    if previous is None:
                        tails[parent] = add_child(tails.get(parent), block_hash)
                    elif previous.children is None:
                        previous.children = block_hash
                    else:
                        previous.children = add_child(previous.children, block_hash)
                if tails and block_hash in tails:
                    block.children = tails.pop(block_hash)
                    self.has_tails = True
                if changes is not None:
                    changes.append(Change(blocks.place, block_hash, block))
            previous = block
            parent = block_hash
        return first_copies

    def remove(self, blocks: PlaceBlocks, block_hash: Any) -> int:
        """Remove one copy. O(1).

        Returns:
            How many were there.
        """
        shards: list[dict[Any, ResidentBlock]] = blocks.shards
        shard = shards[hash(block_hash) % NUM_SHARDS]
        block = self._next_block
        if block is None or blocks is not self._next_blocks or block_hash != self._next_hash:
            block = shard.get(block_hash)
            if block is None:
                return 0
        num_copies: int = block.num_copies
        if num_copies > 1:
            block.num_copies -= 1
            return num_copies
        del shard[block_hash]
        self._next_block = None
        if block.children is not None:
            blocks.tails[block_hash] = block.children
        parent = block.parent
        if parent is not None:
            parent_block = shards[hash(parent) % NUM_SHARDS].get(parent)
            if parent_block is not None:
                parent_block.children = remove_child(parent_block.children, block_hash)
                self._next_blocks = blocks
                self._next_hash = parent
                self._next_block = parent_block
            elif parent in blocks.tails:
                left = remove_child(blocks.tails[parent], block_hash)
                if left is None:
                    del blocks.tails[parent]
                else:
                    blocks.tails[parent] = left
        if self.changes is not None:
            self.changes.append(Change(blocks.place, block_hash, None))
        return 1

    def clear(self) -> None:
        """Remove all hashes, wherever they are. The memory goes back in pieces, by `drop_some`."""
        for blocks in self.places.values():
            self._forgotten.extend([shard for shard in blocks.shards if shard])
        self.places = {}
        self._kinds = {}
        self._last_blocks = None
        self._last_kind = None
        self._next_blocks = None
        self._next_block = None
        if self.changes is not None:
            self.changes.append(None)

    def drop_some(self) -> None:
        """Give some memory of what was cleared back; microseconds."""
        del self._forgotten[-2:]


def add_child(children: Any, block_hash: Any) -> Any:
    """Return `Children` with one more."""
    if children is None:
        return block_hash
    if type(children) is dict:
        children[block_hash] = None
        return children
    return {children: None, block_hash: None}


def remove_child(children: Any, block_hash: Any) -> Any:
    """Return `Children` without this one; None if none is left."""
    if type(children) is dict:
        children.pop(block_hash, None)
        return children or None
    return None if children == block_hash else children


def list_children(children: Any) -> list[ExternalBlockHash]:
    """Return the hashes in `Children`, or in None."""
    if children is None:
        return []
    return list(children) if type(children) is dict else [children]


def find_place(event: BlockStored | BlockRemoved) -> Place:
    """Return the place of an event's blocks."""
    return Place(event.medium, event.group_idx, event.locality, event.ownership)


def is_dense(event: BlockStored) -> bool:
    """Return True if its tokens are those of its blocks, and no others."""
    return len(event.token_ids) == len(event.block_hashes) * event.block_size


def one_each(entries: list[Any] | None, num_hashes: int) -> list[Any] | None:
    """Return the entries if there is one for each hash."""
    return entries if entries and len(entries) == num_hashes else None


def pack_tokens(token_ids: Sequence[int]) -> bytes | None:
    """Token ids as 4 bytes each, or 8 where one needs that; None for what are no token ids."""
    token_ids = token_ids if type(token_ids) is list else list(token_ids)
    for typecode in "IQ":
        packed = array(typecode)
        try:
            packed.fromlist(token_ids)  # a third faster than making an array of the list
            return packed.tobytes()
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
