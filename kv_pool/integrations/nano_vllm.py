"""`BlockManager`: the pool by the names that nano-vllm's scheduler calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, OutOfBlocksError
from kv_pool.ids import BlockHash
from kv_pool.integrations.nano_vllm_views import (
    Blocks,
    ComputeHash,
    FreeBlockIds,
    HashToBlockId,
    UsedBlockIds,
)

_GROUP_ID = 0


class NanoSequence(Protocol):
    """What `BlockManager` reads and writes of a nano-vllm `Sequence`."""

    block_table: list[int]
    num_cached_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks that all tokens so far take, the last one perhaps not full."""

    def block(self, i: int, /) -> list[int]:
        """The token ids of block `i`."""

    def __len__(self) -> int:
        """Prompt and output so far, in tokens."""


class ScheduledSequence(NanoSequence, Protocol):
    """What `hash_blocks` reads besides."""

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens of this step, after the `num_cached_tokens` that were computed before it."""


class Admission(int):
    """What `can_allocate` answers: a number for today's scheduler, a truth value for the one of 2025.

        >>> from kv_pool.integrations.nano_vllm import Admission
        >>> fits, full = Admission(0, has_room=True), Admission(-1, has_room=False)
        >>> fits == -1, bool(fits), full == -1, bool(full)
        (False, True, True, False)

    The number: how many blocks of the prompt are cached, -1 where it does not fit; a cached block that is in
    use costs nothing. True: even with every block of the prompt a new one it would fit. The two rules differ,
    so a number of 0 or more may be false.
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
    """The blocks of one sequence; to the pool, the request that they are cached for.

    Attributes:
        sequence: kept alive, since holdings are found by its identity.
        caches_at_once: its full blocks are cached before the step that computes them, not after.
        blocks: head first; what `sequence.block_table` says, as objects.
        block_hashes: of the blocks from the head on that were made findable.
    """

    sequence: NanoSequence
    caches_at_once: bool
    blocks: list[KVCacheBlock]
    block_hashes: list[BlockHash]
    # With events off the pool reads nothing but the hashes.
    all_token_ids: Sequence[int] = ()
    lora_request: Any = None
    mm_features: Sequence[Any] | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class BlockManager:
    """A `BlockPool` under nano-vllm's own scheduler: takes the place of `nanovllm.engine.block_manager`'s.

        from kv_pool.integrations.nano_vllm import BlockManager    # the one line to change, in scheduler.py

    Same admissions, same preemptions, same `num_cached_tokens`, same ids in `block_table` as theirs. To take
    a hit out of the middle of the free list costs them O(number of free blocks), here O(1). It serves both
    shapes of the scheduler, and icinfer's, which has the earlier one:

        | until 2025                          | today                                                 |
        |-------------------------------------|-------------------------------------------------------|
        | `can_allocate(seq)`: true or false  | `can_allocate(seq)`: cached blocks or -1              |
        | `allocate(seq)`                     | `allocate(seq, num_cached_blocks)`                    |
        | a full last block may be a hit      | the last block is always computed                     |
        | cached by `allocate`, `may_append`  | cached by `hash_blocks`, once computed                |

    Which of the two a sequence lives by is decided by the way it was allocated.

    The order of reuse is theirs, not that of `KVCacheManager`: blocks are reused in the order in which they
    were freed, cached or not, a sequence's tail before its head. Of several blocks with one prefix only the
    one cached last can be hit; when it is reused the prefix is gone.

    What differs from theirs, on purpose:

    - Their manager of 2025 leaves a reused block's old hash in its map, and tells a stale entry by comparing
      that one block's tokens: the same tokens behind another prefix pass for a hit. Here they are none.
    - They compare tokens behind 64 bits of xxhash; here 128 bits of hash decide (`BlockHasher`).
    - Where the caller errs (freed twice, allocated twice, not allocated, too many) an error is raised and
      nothing has changed; there it is an assertion, an IndexError half way, or nothing at all.
    - Their attributes are read-only views here, and their hashes are other numbers. What the pool itself
      knows is in `block_pool`, where block n of the engine is `blocks[n + 1]`: block 0 is the pool's null
      block, which the engine never sees.

    As theirs: a prompt of full blocks that are all cached leaves a scheduler of 2025 nothing to compute.

    Args:
        num_blocks: blocks in the engine's KV tensors; all of them, 0 to num_blocks - 1, are handed out.
        block_size: tokens per block, the same as `Sequence.block_size`.
        hasher: names the prefixes; by default `xxh3_128` with a secret seed.

    Attributes:
        blocks: by id, each with `block_id`, `ref_count`, `hash` and `token_ids`.
        free_block_ids: ids of free blocks, the next to be reused first: `free_block_ids[0]`, `len`, `in`.
        used_block_ids: ids of blocks that sequences hold.
        hash_to_block_id: from the hash of a cached prefix to the block that holds its end.

    Contract: nano-vllm's `BlockManager`, with a scheduler that gives each sequence one object.
    """

    compute_hash = ComputeHash()

    def __init__(self, num_blocks: int, block_size: int, *, hasher: BlockHasher | None = None) -> None:
        if not isinstance(num_blocks, int) or num_blocks < 1:
            raise InvalidArgumentError(f"num_blocks is {num_blocks!r}; it counts blocks, at least 1")
        self.hasher = BlockHasher(block_size=block_size) if hasher is None else hasher
        if self.hasher.block_size != block_size or self.hasher.num_lookahead_tokens:
            raise InvalidArgumentError(
                f"the hasher covers {self.hasher.block_size} tokens and {self.hasher.num_lookahead_tokens} "
                f"of lookahead; make it with block_size={block_size} and none"
            )
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks + 1, True, block_size)
        # By the pool's ids: what was in a block when it was cached last.
        self._token_ids: list[Sequence[int]] = [()] * (num_blocks + 1)
        self.blocks = Blocks(self.block_pool, self._token_ids)
        self.free_block_ids = FreeBlockIds(self.block_pool)
        self.used_block_ids = UsedBlockIds(self.block_pool)
        self.hash_to_block_id = HashToBlockId(self.block_pool, self.hasher.digest_size)
        self._holdings: dict[int, _Holding] = {}

    # ---- prefill ---------------------------------------------------------------------------------

    def can_allocate(self, seq: NanoSequence) -> Admission:
        """Would the sequence fit now, and how much of it is cached? Changes nothing.

        Raises:
            InvalidArgumentError: the sequence cuts its tokens into blocks of another size.
        Cost: O(tokens of the cached blocks and one more), whatever is free.
        """
        num_blocks = self._count_blocks(seq)
        hits, _ = self._find_cached_prefix(seq, num_blocks - 1)
        num_new_blocks = num_blocks - sum(1 for block in hits if block.ref_cnt)
        num_free_blocks = self.block_pool.get_num_free_blocks()
        return Admission(
            len(hits) if num_new_blocks <= num_free_blocks else -1, num_blocks <= num_free_blocks
        )

    def allocate(self, seq: NanoSequence, num_cached_blocks: int | None = None) -> None:
        """Fill `seq.block_table` for all its tokens, and set `seq.num_cached_tokens`.

            |<-- num_cached_blocks -->|<------ get_new_blocks ------>|
            |      touch these        |  full, full, ..., maybe full |

        Args:
            num_cached_blocks: what `can_allocate` answered, or less; `hash_blocks` will cache the others.
                None: as many as are found, the last one too if it is full; all full ones are cached now.
        Raises:
            OutOfBlocksError: it does not fit.
            InvalidArgumentError: the sequence has blocks; more hits are asked for than there are; it cuts its
                tokens into blocks of another size. In all cases nothing has changed.
        Cost: O(tokens looked up or cached, blocks), whatever is free.
        """
        if id(seq) in self._holdings or seq.block_table:
            raise InvalidArgumentError(
                f"{_name(seq)} holds blocks already, {len(seq.block_table)} in its table; "
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
                    f"{_name(seq)} was to get {num_cached_blocks} cached blocks, {len(hits)} are; "
                    "ask can_allocate() again, and keep it waiting on -1"
                )
        pool = self.block_pool
        num_wanted = num_blocks - sum(1 for block in hits if block.ref_cnt)
        if num_wanted > pool.get_num_free_blocks():
            raise OutOfBlocksError(
                f"{_name(seq)} needs {num_wanted} free blocks, {pool.get_num_free_blocks()} are free of "
                f"{pool.num_gpu_blocks - 1}; ask can_allocate() first, and preempt others"
            )
        # Hits first: until they are touched, they may be among the blocks that get_new_blocks takes.
        pool.touch(hits)
        blocks = hits + pool.get_new_blocks(num_blocks - len(hits))
        holding = _Holding(seq, caches_at_once, blocks, hashes)
        self._holdings[id(seq)] = holding
        self._cache(holding, new_hashes)
        seq.block_table.extend(_to_engine_id(block) for block in blocks)
        seq.num_cached_tokens = len(hits) * self.block_size

    def hash_blocks(self, seq: ScheduledSequence) -> None:
        """Cache the blocks that are full after this step's `seq.num_scheduled_tokens` tokens.

        To be called before they are added to `seq.num_cached_tokens`. Blocks that were cached before are
        passed over.
        Raises:
            InvalidArgumentError: the sequence has no blocks, or has neither tokens nor blocks for so many.
                Nothing has changed.
        Cost: O(tokens of the blocks cached).
        """
        holding = self._holding_of(seq)
        num_computed_tokens = seq.num_cached_tokens + seq.num_scheduled_tokens
        if num_computed_tokens > min(len(seq), len(holding.blocks) * self.block_size):
            raise InvalidArgumentError(
                f"{_name(seq)} says {num_computed_tokens} tokens are computed after this step, but has "
                f"{len(seq)} tokens and {len(holding.blocks)} blocks of {self.block_size}; call it before "
                "num_cached_tokens is counted up"
            )
        num_full_blocks = num_computed_tokens // self.block_size
        self._cache(holding, self._hash_blocks(seq, holding.block_hashes, num_full_blocks))

    # ---- decode ----------------------------------------------------------------------------------

    def can_append(self, seq: NanoSequence) -> bool:
        """Is there a free block, if the sequence's last token needs one? Changes nothing. O(1).

        Raises:
            InvalidArgumentError: the sequence has no blocks.
        """
        return self._count_missing_blocks(self._holding_of(seq)) <= self.block_pool.get_num_free_blocks()

    def may_append(self, seq: NanoSequence) -> None:
        """Append a block to the table if the sequence's last token has no slot yet.

        Raises:
            OutOfBlocksError: none is free; ask `can_append` first.
            InvalidArgumentError: the sequence has no blocks. In both cases nothing has changed.
        Cost: O(1), and O(block_size) where a block becomes full that is cached before it is computed.
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

    # ---- at the end, or on preemption ------------------------------------------------------------

    def deallocate(self, seq: NanoSequence) -> None:
        """Give all blocks of the sequence back, empty its table, set `num_cached_tokens` to 0.

        They stay findable until they are reused.
        Raises:
            InvalidArgumentError: the sequence has no blocks (freed twice?).
            InvalidBlockError: its table is not the one that was filled here, or a block of it was freed
                behind the manager's back. In all cases nothing has changed.
        Cost: O(blocks).
        """
        holding = self._holding_of(seq)
        if seq.block_table != [_to_engine_id(block) for block in holding.blocks]:
            raise InvalidBlockError(
                f"the block_table of {_name(seq)} has {len(seq.block_table)} blocks and was filled with "
                f"{len(holding.blocks)}, or other ones; only the block manager writes it"
            )
        # Not free_blocks(), which reuses what has no hash first: theirs reuses in the order of freeing.
        self.block_pool.unpin_blocks(reversed(holding.blocks), _ignore_reuse)
        del self._holdings[id(seq)]
        seq.block_table.clear()
        seq.num_cached_tokens = 0

    # ---- inside ----------------------------------------------------------------------------------

    def _holding_of(self, seq: NanoSequence) -> _Holding:
        holding = self._holdings.get(id(seq))
        if holding is None:
            raise InvalidArgumentError(
                f"{_name(seq)} has no blocks here: never allocated, or deallocated already; "
                "call allocate() first"
            )
        return holding

    def _count_blocks(self, seq: NanoSequence) -> int:
        num_blocks = -(-len(seq) // self.block_size)
        if num_blocks != seq.num_blocks or num_blocks == 0:
            raise InvalidArgumentError(
                f"{_name(seq)} has {len(seq)} tokens in {seq.num_blocks} blocks, which blocks of "
                f"{self.block_size} would be {num_blocks}; set Sequence.block_size to the manager's"
            )
        return num_blocks

    def _count_missing_blocks(self, holding: _Holding) -> int:
        return max(0, self._count_blocks(holding.sequence) - len(holding.blocks))

    def _find_cached_prefix(
        self, seq: NanoSequence, max_num_blocks: int
    ) -> tuple[list[KVCacheBlock], list[BlockHash]]:
        """The blocks of the sequence that can be hit, head first, and their hashes; hashes one block more."""
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
        """The hashes that come after `known`, up to that of the `num_full_blocks`-th block."""
        token_ids: list[int] = []
        for index in range(len(known), num_full_blocks):
            token_ids.extend(seq.block(index))
        return self.hasher.hash_blocks(token_ids, known[-1] if known else None)

    def _cache(self, holding: _Holding, new_hashes: list[BlockHash]) -> None:
        """Make the next blocks of the sequence findable by these hashes, and no other block."""
        pool = self.block_pool
        for block_hash in new_hashes:
            for block in pool.get_cached_block(block_hash, [_GROUP_ID]) or ():
                pool.evict_blocks([block.block_id])
        num_cached_blocks = len(holding.block_hashes)
        for index in range(num_cached_blocks, num_cached_blocks + len(new_hashes)):
            self._token_ids[holding.blocks[index].block_id] = holding.sequence.block(index)
        holding.block_hashes.extend(new_hashes)
        pool.cache_full_blocks(
            holding, holding.blocks, num_cached_blocks, len(holding.block_hashes), self.block_size, _GROUP_ID
        )


def _to_engine_id(block: KVCacheBlock) -> int:
    """The block's place in the engine's KV tensors, which have none for the null block."""
    return block.block_id - 1


def _name(seq: NanoSequence) -> str:
    return f"sequence {getattr(seq, 'seq_id', '')}".strip()


def _ignore_reuse(block: KVCacheBlock) -> None:
    """Nobody waits for the block."""
