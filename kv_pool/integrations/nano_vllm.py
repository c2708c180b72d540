"""`BlockManager`: the pool under the names that nano-vllm's scheduler calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from kv_pool.core.arguments import as_count, as_int, as_list
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_keys import get_block_hash
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.ids import BlockHash, BlockId, GroupId

_GROUP_ID = GroupId(0)
_NO_HASH = -1
"""The hash of a block that is not cached, and the `prefix` of a sequence's first block."""


class NanoSequence(Protocol):
    """The attributes and methods of a nano-vllm `Sequence` that `BlockManager` uses."""

    block_table: list[int]
    num_cached_tokens: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks that all tokens so far need, including a partly filled last one."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of tokens of this step, after the `num_cached_tokens` computed before it. Not in 2025."""

    def block(self, i: int, /) -> list[int]:
        """Return the token ids of block `i`."""

    def __len__(self) -> int:
        """Return the number of tokens of the prompt and of the output so far."""


class Admission(int):
    """The result of `can_allocate`: a number for today's scheduler, a truth value for the 2025 scheduler.

        >>> from kv_pool.integrations.nano_vllm import Admission
        >>> fits, full = Admission(0, has_room=True), Admission(-1, has_room=False)
        >>> fits == -1, bool(fits), full == -1, bool(full)
        (False, True, True, False)

    The number is how many blocks of the prompt are cached, or -1 if the prompt does not fit; a cached block
    that is in use costs nothing. The truth value is True if the prompt would fit even if every block were
    new. The two rules differ, so a number of 0 or more may be false.
    """

    has_room: bool

    def __new__(cls, num_cached_blocks: int, has_room: bool) -> "Admission":
        answer = super().__new__(cls, num_cached_blocks)
        answer.has_room = has_room
        return answer

    def __bool__(self) -> bool:
        return self.has_room


@dataclass(eq=False, slots=True)
class _Holding:
    """The blocks of one sequence; the pool reads it as the request that it caches them for.

    Attributes:
        sequence: kept alive, since holdings are found by its identity.
        caches_at_once: whether full blocks are cached before the step that computes them, not after it.
        blocks: the block objects of `sequence.block_table`, in order.
        block_hashes: hashes of the blocks that are cached so far, from the first one on.
    """

    sequence: NanoSequence
    caches_at_once: bool
    blocks: list[KVCacheBlock]
    block_hashes: list[BlockHash]


class Block(NamedTuple):
    """The state of one block at the moment of `BlockManager.blocks`.

    Attributes:
        block_id: the engine's id.
        ref_count: number of sequences that hold the block; 0 for a free one.
        hash: the hash under which the block is cached, as from `compute_hash`; -1 if it is not cached.
        token_ids: the tokens of the block, as many as the block size; [] if it is not cached.
    """

    block_id: BlockId
    ref_count: int
    hash: int
    token_ids: list[int]


class BlockManager:
    """A `BlockPool` for nano-vllm's own scheduler; replaces the class in `nanovllm.engine.block_manager`.

        from kv_pool.integrations.nano_vllm import BlockManager    # the one line to change, in scheduler.py

    Admissions, preemptions, `num_cached_tokens` and the ids in `block_table` are those of nano-vllm's
    manager. That manager needs O(number of free blocks) to take a hit out of its free list; this one needs
    O(1). This class supports both versions of the scheduler, and icinfer's, which matches the earlier one:

        | until 2025                          | today                                                 |
        |-------------------------------------|-------------------------------------------------------|
        | `can_allocate(seq)`: true or false  | `can_allocate(seq)`: cached blocks or -1              |
        | `allocate(seq)`                     | `allocate(seq, num_cached_blocks)`                    |
        | a full last block may be a hit      | the last block is always computed                     |
        | cached by `allocate`, `may_append`  | cached by `hash_blocks`, once computed                |

    The call of `allocate` decides which version applies to a sequence.

    The reuse order is nano-vllm's, not that of `KVCacheManager`: blocks are reused in the order in which they
    were freed, cached or not, a sequence's tail before its head. If several blocks have the same prefix, only
    the one cached last can be hit; when it is reused, the prefix is evicted.

    Deliberate differences from nano-vllm's manager:

    - The 2025 manager leaves a reused block's old hash in its map, and detects a stale entry by comparing the
      tokens of that one block: the same tokens after another prefix count as a hit. Here they are a miss.
    - It compares tokens in addition to 64 bits of xxhash; here 128 bits of hash decide (`BlockHasher`).
    - Caller errors (double free, double allocation, not allocated, too many tokens) raise and change nothing;
      there they cause an assertion, an IndexError half-way, or go unnoticed.
    - Its attributes are copies of the pool's state here, made in O(blocks) at each access, and the hashes
      are different numbers. The pool itself is `block_pool`, where block n of the engine is `blocks[n + 1]`:
      block 0 is the pool's null block, which the engine never sees.

    As in nano-vllm, a prompt whose blocks are all full and cached leaves the 2025 scheduler no token to
    compute.

    Args:
        num_blocks: blocks in the engine's KV tensors; all of them, 0 to num_blocks - 1, can be allocated.
        block_size: tokens per block, the same as `Sequence.block_size`.
        hasher: hashes the prefixes; by default `xxh3_128` with a secret seed.

    Contract: nano-vllm's `BlockManager`, with a scheduler that uses one object per sequence.
    """

    def __init__(self, num_blocks: int, block_size: int, *, hasher: BlockHasher | None = None) -> None:
        num_blocks = as_count("num_blocks", num_blocks, 1)
        self.hasher = BlockHasher(block_size=block_size) if hasher is None else hasher
        if self.hasher.block_size != block_size or self.hasher.num_lookahead_tokens:
            raise InvalidArgumentError(
                f"the hasher covers {self.hasher.block_size} tokens and {self.hasher.num_lookahead_tokens} "
                f"lookahead tokens; create it with block_size={block_size} and no lookahead"
            )
        # Called on the class, it uses the default hasher.
        self.compute_hash = partial(_compute_hash, self.hasher)  # type: ignore[method-assign]
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks + 1, True, block_size)
        # By the pool's block ids: the tokens of the block when it was last cached.
        self._token_ids: list[Sequence[int]] = [()] * (num_blocks + 1)
        self._holdings: dict[int, _Holding] = {}

    @staticmethod
    def compute_hash(token_ids: Sequence[int], prefix: int = _NO_HASH) -> int:
        """Return the hash under which a full block of these tokens is cached.

            >>> from kv_pool.integrations.nano_vllm import BlockManager
            >>> manager = BlockManager(num_blocks=8, block_size=2)
            >>> head = manager.compute_hash([1, 2])
            >>> manager.compute_hash([3, 4], head) == BlockManager.compute_hash([3, 4], head)
            True
            >>> manager.hash_to_block_id.get(head, -1)
            -1

        The number differs from nano-vllm's, and between processes: 128 bits with a secret seed by default, or
        the result of the manager's `hasher`. Called on the class, it uses the default hasher.

        Args:
            token_ids: the tokens of one full block.
            prefix: the hash of the previous block; -1 for the first block of a sequence.
        Raises:
            InvalidArgumentError: the tokens are not a full block, or `prefix` is not a hash.
        Cost: O(tokens).
        """
        return _compute_hash(None, token_ids, prefix)

    # ---- nano-vllm's attributes ------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """The blocks by id."""
        return [
            Block(
                _to_engine_id(block),
                block.ref_cnt,
                _to_number(block),
                [] if block.block_hash is None else list(self._token_ids[block.block_id]),
            )
            for block in self.block_pool.blocks[1:]
        ]

    @property
    def free_block_ids(self) -> list[BlockId]:
        """The ids of the free blocks, the next to be reused first."""
        return [_to_engine_id(block) for block in self.block_pool.free_block_queue.iter_blocks_after(None)]

    @property
    def used_block_ids(self) -> set[BlockId]:
        """The ids of the blocks that sequences hold."""
        return {_to_engine_id(block) for block in self.block_pool.blocks[1:] if block.ref_cnt}

    @property
    def hash_to_block_id(self) -> dict[int, BlockId]:
        """The hash of each cached prefix, and the id of its last block. Every entry can be hit."""
        cached = [block for block in self.block_pool.blocks[1:] if block.block_hash is not None]
        return {_to_number(block): _to_engine_id(block) for block in cached}

    # ---- prefill ---------------------------------------------------------------------------------

    def can_allocate(self, seq: NanoSequence) -> Admission:
        """Return whether the sequence fits now, and how many of its blocks are cached. Changes nothing.

        Raises:
            InvalidArgumentError: the sequence uses another block size.
        Cost: O(tokens of the cached blocks and one more), independent of the number of free blocks.
        """
        num_blocks = self._count_blocks(seq)
        hits, _ = self._find_cached_prefix(seq, num_blocks - 1)
        num_new_blocks = num_blocks - sum(1 for block in hits if block.ref_cnt)
        num_free_blocks = self.block_pool.get_num_free_blocks()
        return Admission(
            len(hits) if num_new_blocks <= num_free_blocks else -1, num_blocks <= num_free_blocks
        )

    def allocate(self, seq: NanoSequence, num_cached_blocks: int | None = None) -> None:
        """Allocate blocks for all tokens into `seq.block_table`, and set `seq.num_cached_tokens`.

            |<-- num_cached_blocks -->|<------ get_new_blocks ------>|
            |      touch these        |  full, full, ..., maybe full |

        Args:
            num_cached_blocks: the result of `can_allocate`, or less; `hash_blocks` caches the other blocks
                later. None: use all cached blocks, including a full last one, and cache all full blocks now.
        Raises:
            OutOfBlocksError: too few blocks are free.
            InvalidArgumentError: the sequence already has blocks, has fewer cached blocks than
                `num_cached_blocks`, or uses another block size. In all cases nothing has changed.
        Cost: O(tokens looked up or cached, blocks), independent of the number of free blocks.
        """
        if id(seq) in self._holdings or seq.block_table:
            raise InvalidArgumentError(
                f"{_name(seq)} already holds blocks, {len(seq.block_table)} in its table; "
                "deallocate() it first"
            )
        num_blocks = self._count_blocks(seq)
        caches_at_once = num_cached_blocks is None
        if num_cached_blocks is None:
            hits, hashes = self._find_cached_prefix(seq, len(seq) // self.block_size)
            new_hashes = self._hash_blocks(seq, hashes, len(seq) // self.block_size)
        else:
            hits, hashes = self._find_cached_prefix(seq, min(num_cached_blocks, num_blocks))
            new_hashes = []
            if num_cached_blocks != len(hits):
                raise InvalidArgumentError(
                    f"{_name(seq)} has {len(hits)} cached blocks, not {num_cached_blocks}; "
                    "call can_allocate() again, and keep the sequence waiting if it returns -1"
                )
        pool = self.block_pool
        num_wanted = num_blocks - sum(1 for block in hits if block.ref_cnt)
        if num_wanted > pool.get_num_free_blocks():
            raise OutOfBlocksError(
                f"{_name(seq)} needs {num_wanted} free blocks, {pool.get_num_free_blocks()} are free of "
                f"{pool.num_gpu_blocks - 1}; call can_allocate() first, and preempt other sequences"
            )
        # Touch hits first: until then, get_new_blocks may take them.
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(num_blocks - len(hits))
        holding = _Holding(seq, caches_at_once, blocks, hashes)
        self._holdings[id(seq)] = holding
        self._cache(holding, new_hashes)
        seq.block_table.extend(_to_engine_id(block) for block in blocks)
        seq.num_cached_tokens = len(hits) * self.block_size

    def hash_blocks(self, seq: NanoSequence) -> None:
        """Cache the blocks that are full after this step's `seq.num_scheduled_tokens` tokens.

        Call this before these tokens are added to `seq.num_cached_tokens`. Skips blocks that are already
        cached.

        Raises:
            InvalidArgumentError: the sequence has no blocks, or too few tokens or blocks for the scheduled
                tokens. Nothing has changed.
        Cost: O(tokens of the blocks cached).
        """
        holding = self._holding_of(seq)
        num_computed_tokens = seq.num_cached_tokens + seq.num_scheduled_tokens
        if num_computed_tokens > min(len(seq), len(holding.blocks) * self.block_size):
            raise InvalidArgumentError(
                f"{_name(seq)} would have {num_computed_tokens} computed tokens after this step, but has "
                f"{len(seq)} tokens and {len(holding.blocks)} blocks of {self.block_size}; call "
                "hash_blocks() before num_cached_tokens is increased"
            )
        num_full_blocks = num_computed_tokens // self.block_size
        self._cache(holding, self._hash_blocks(seq, holding.block_hashes, num_full_blocks))

    # ---- decode ----------------------------------------------------------------------------------

    def can_append(self, seq: NanoSequence) -> bool:
        """Return whether a block is free if the sequence's last token needs one. Changes nothing. O(1).

        Raises:
            InvalidArgumentError: the sequence has no blocks.
        """
        return self._count_missing_blocks(self._holding_of(seq)) <= self.block_pool.get_num_free_blocks()

    def may_append(self, seq: NanoSequence) -> None:
        """Append a block to the table if the sequence's last token has no slot yet.

        Raises:
            OutOfBlocksError: no block is free; call `can_append` first.
            InvalidArgumentError: the sequence has no blocks. In both cases nothing has changed.
        Cost: O(1); O(block_size) when a block becomes full and is cached before it is computed.
        """
        holding = self._holding_of(seq)
        new_hashes: list[BlockHash] = []
        if holding.caches_at_once:
            new_hashes = self._hash_blocks(seq, holding.block_hashes, len(seq) // self.block_size)
        num_missing_blocks = self._count_missing_blocks(holding)
        if num_missing_blocks:
            blocks = self.block_pool.get_new_blocks(num_missing_blocks)
            holding.blocks.extend(blocks)
            seq.block_table.extend(_to_engine_id(block) for block in blocks)
        self._cache(holding, new_hashes)

    # ---- end or preemption -----------------------------------------------------------------------

    def deallocate(self, seq: NanoSequence) -> None:
        """Free all blocks of the sequence, empty its table and set `num_cached_tokens` to 0.

        Cached blocks can be hit until they are reused.

        Raises:
            InvalidArgumentError: the sequence has no blocks. Was it freed twice?
            InvalidBlockError: its table was changed outside this manager, or one of its blocks was freed
                outside this manager. In all cases nothing has changed.
        Cost: O(blocks).
        """
        holding = self._holding_of(seq)
        if seq.block_table != [_to_engine_id(block) for block in holding.blocks]:
            raise InvalidBlockError(
                f"the block_table of {_name(seq)} ({len(seq.block_table)} blocks) is not the one that this "
                f"manager wrote ({len(holding.blocks)} blocks); only the block manager may change it"
            )
        # Not free_blocks(), which reuses blocks without a hash first: nano-vllm reuses in the order of
        # freeing.
        self.block_pool.unpin_blocks(reversed(holding.blocks), _ignore_reuse)
        del self._holdings[id(seq)]
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    # ---- internals -------------------------------------------------------------------------------

    def _holding_of(self, seq: NanoSequence) -> _Holding:
        holding = self._holdings.get(id(seq))
        if holding is None:
            raise InvalidArgumentError(
                f"{_name(seq)} has no blocks: it was never allocated, or is already deallocated; "
                "call allocate() first"
            )
        return holding

    def _count_blocks(self, seq: NanoSequence) -> int:
        num_blocks = -(-len(seq) // self.block_size)
        if num_blocks != seq.num_blocks or num_blocks == 0:
            raise InvalidArgumentError(
                f"{_name(seq)} has {len(seq)} tokens in {seq.num_blocks} blocks, but with block size "
                f"{self.block_size} it would have {num_blocks}; set Sequence.block_size to the manager's"
            )
        return num_blocks

    def _count_missing_blocks(self, holding: _Holding) -> int:
        return max(0, self._count_blocks(holding.sequence) - len(holding.blocks))

    def _find_cached_prefix(
        self, seq: NanoSequence, max_num_blocks: int
    ) -> tuple[list[KVCacheBlock], list[BlockHash]]:
        """Return the sequence's cached blocks in order, and their hashes. Hashes one block more than hit."""
        hits: list[KVCacheBlock] = []
        hashes: list[BlockHash] = []
        while len(hits) < max_num_blocks:
            (block_hash,) = self._hash_blocks(seq, hashes, len(hashes) + 1)
            found = self.block_pool.get_cached_block(block_hash, [_GROUP_ID])
            if found is None:
                break
            hashes.append(block_hash)
            hits.extend(found)
        return hits, hashes

    def _hash_blocks(
        self, seq: NanoSequence, known: Sequence[BlockHash], num_full_blocks: int
    ) -> list[BlockHash]:
        """Return the hashes after `known`, up to that of the `num_full_blocks`-th block."""
        token_ids: list[int] = []
        for index in range(len(known), num_full_blocks):
            token_ids.extend(seq.block(index))
        return self.hasher.hash_blocks(token_ids, known[-1] if known else None)

    def _cache(self, holding: _Holding, new_hashes: list[BlockHash]) -> None:
        """Cache the next blocks of the sequence under these hashes, and evict other blocks with them."""
        pool = self.block_pool
        for block_hash in new_hashes:
            for block in pool.get_cached_block(block_hash, [_GROUP_ID]) or ():
                pool.evict_blocks([block.block_id])
        num_cached_blocks = len(holding.block_hashes)
        for index in range(num_cached_blocks, num_cached_blocks + len(new_hashes)):
            self._token_ids[holding.blocks[index].block_id] = holding.sequence.block(index)
        holding.block_hashes.extend(new_hashes)
        request: Any = holding  # without events, the pool reads only its block hashes
        pool.cache_full_blocks(
            request, holding.blocks, num_cached_blocks, len(holding.block_hashes), self.block_size, _GROUP_ID
        )


def _to_engine_id(block: KVCacheBlock) -> BlockId:
    """Return the block's index in the engine's KV tensors, which have no null block."""
    return BlockId(block.block_id - 1)


def _to_number(block: KVCacheBlock) -> int:
    """Return the hash of a block as a number, -1 if it is not cached."""
    key = block.block_hash
    return _NO_HASH if key is None else int.from_bytes(get_block_hash(key), "big")


def _compute_hash(hasher: BlockHasher | None, token_ids: Sequence[int], prefix: int = _NO_HASH) -> int:
    """See `BlockManager.compute_hash`; None is the default hasher."""
    tokens = as_list("token_ids", token_ids)
    prefix = as_int("prefix", prefix)
    if hasher is None:
        hasher = BlockHasher(block_size=max(1, len(tokens)))
    if len(tokens) != hasher.block_size or not tokens:
        raise InvalidArgumentError(
            f"token_ids has {len(tokens)} tokens; only full blocks of {hasher.block_size} tokens are hashed"
        )
    if not _NO_HASH <= prefix < 256**hasher.digest_size:
        raise InvalidArgumentError(
            f"prefix is {prefix}; it is a hash of {hasher.digest_size} bytes, 0 or more, or -1 for none"
        )
    parent = None if prefix == _NO_HASH else BlockHash(prefix.to_bytes(hasher.digest_size, "big"))
    return int.from_bytes(hasher.hash_blocks(tokens, parent)[0], "big")


def _name(seq: NanoSequence) -> str:
    return f"sequence {getattr(seq, 'seq_id', '')}".strip()


def _ignore_reuse(block: KVCacheBlock) -> None:
    """Do nothing: no request waits for the reuse of the block."""
