"""`LiveCurve`: the stack distances of a running pool's look-ups, from a sample of its blocks.

The sample is that of SHARDS (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST, 2015): a
block is in it if the hash of its key is below a bound, so all its uses are seen or none. The stack of the
sample is bounded, hence also the memory. A key stands for its whole prefix, so the sampled blocks before it
are always the same: a hit is found by its deepest sampled block, without a look at the others. The hash is
Python's, which differs from process to process.
"""

from collections.abc import Callable
from math import ceil
from typing import Any, Final

from mypy_extensions import i64

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_part import PoolPart
from kv_pool.core.sampled_stack import SampledBlock, SampledStack
from kv_pool.ids import GroupId

MAX_MULTIPLE: Final = 4
STEPS_PER_CAPACITY: Final = 64
NUM_STEPS: Final = 256
"""The steps of the histogram, up to `MAX_MULTIPLE` capacities; one more counts what is farther away."""
NUM_REPLICAS: Final = 8
ROW: Final = 258
"""The counters of a replica: steps 0 to `NUM_STEPS`, and those beyond."""
MAX_SAMPLES: Final = 2048
MAX_RATE: Final = 0.25
HALF_LIFE: Final = 32
_PERIODS_PER_HALF_LIFE: Final = 16
_GROWTH: Final = 2.0 ** (1 / 16)
_MAX_WEIGHT: Final = 2.0**40
_OPEN_SHARE: Final = 64
_SALT_FACTOR: Final = 0x9E3779B97F4A7C15
"""Spreads a salt over the bits of a hash that choose the sample (Knuth's multiplicative hashing)."""


class LiveCurve(PoolPart):
    """Counts the look-ups of a pool by their distance in the LRU stack, in multiples of the capacity.

    Look-ups are the blocks that requests touch, and the prompt blocks that they cache. The request's
    attribute `num_prompt_tokens`, if it has one, tells prompts from generated tokens.

    Args:
        capacity: blocks of the pool, without the null block.
        block_size: tokens per block.
        clock: returns the time in seconds.
        max_samples: maximum number of blocks in the sample.
        half_life: number of look-ups after which a look-up counts half; None for 32 times the capacity.
        max_rate: maximum share of the blocks in the sample; 1 for exact distances in small pools.
        salt: chooses another sample.

    Attributes:
        rate: share of the blocks that is in the sample.
        counts: NUM_REPLICAS rows of sampled look-ups by distance. A block in step s is a hit in pools of at
            least s / 64 of the capacity.
        weight: of the next look-up, in all sums. It grows, so that earlier look-ups count less.
        looked_up_blocks, hit_blocks: sums over all look-ups, sampled or not.
        looked_up_tokens, hit_tokens: the same in tokens; the former includes partial blocks of prompts.
        period_starts: times of the last periods' starts; a half-life has 16 periods of look-ups.
    """

    def __init__(
        self,
        capacity: int,
        block_size: int,
        clock: Callable[[], float],
        max_samples: int = MAX_SAMPLES,
        half_life: int | None = None,
        max_rate: float = MAX_RATE,
        salt: int = 0,
    ) -> None:
        self.capacity: int = capacity
        self.block_size: int = block_size
        self.max_samples: int = max_samples
        self.max_rate: float = max_rate
        self._clock: Callable[[], float] = clock
        self._half_life: int | None = half_life
        self._salt: i64 = salt * _SALT_FACTOR & 0xFFFFFFFFFFFF
        self.restart()

    @property
    def half_life(self) -> int:
        """The number of look-ups after which a look-up counts half."""
        return HALF_LIFE * self.capacity if self._half_life is None else self._half_life

    @property
    def period(self) -> int:
        """The number of look-ups between two increases of the weight."""
        return max(1, self.half_life // _PERIODS_PER_HALF_LIFE)

    def restart(self) -> None:
        """Start with an empty stack and without counts."""
        capacity = max(1, self.capacity)
        self.rate: float = min(self.max_rate, self.max_samples / (MAX_MULTIPLE * capacity))
        self._bound: i64 = int(self.rate * 4294967296)
        limit = ceil(MAX_MULTIPLE * capacity * self.rate)
        self._max_above: i64 = limit // _OPEN_SHARE
        self.stack: SampledStack = SampledStack(limit)
        self.counts: list[float] = [0.0] * (NUM_REPLICAS * ROW)
        self.weight: float = 1.0
        self.looked_up_blocks: float = 0.0
        self.hit_blocks: float = 0.0
        self.looked_up_tokens: float = 0.0
        self.hit_tokens: float = 0.0
        self._until_next_period: int = self.period
        self.period_starts: list[float] = [self._clock()]

    def measure_half_life(self) -> float | None:
        """Return the time of a half-life of look-ups at their present rate, in seconds; None if unknown."""
        periods = self.period_starts
        num_lookups = len(periods) * self.period - self._until_next_period
        seconds = self._clock() - periods[0]
        return seconds * self.half_life / num_lookups if num_lookups > 0 and seconds > 0 else None

    # ---- calls of the pool -------------------------------------------------------------------------

    def note_touched(self, blocks: list[KVCacheBlock], num_free: i64, is_access: bool) -> None:
        """Handle a hit: the blocks of one request, or of one of its groups, first block first."""
        if not is_access:
            return
        num_blocks: i64 = len(blocks)
        if num_blocks > 0 and blocks[0].is_null:
            num_blocks = self._note_touched_singly(blocks)
        elif num_blocks > 0:
            block = self._find_deepest(blocks, num_blocks - 1)
            if block is not None:
                for rank in self.stack.access(block):
                    assert block is not None
                    self._count(block, rank)
                    block = block.parent
        self._add_lookups(num_blocks, num_blocks, 0)

    def note_cached(
        self,
        request: Any,
        table: Any,
        blocks: list[KVCacheBlock],
        num_before: int,
        block_size: int,
        group_id: GroupId,
    ) -> None:
        self.block_size = block_size
        num_prompt: Any = getattr(request, "num_prompt_tokens", None)
        num_counted: i64 = len(blocks)
        num_partial: i64 = 0
        if isinstance(num_prompt, int):
            num_full = num_prompt // block_size
            num_counted = max(0, min(len(blocks), num_full - num_before))
            if num_before < num_full <= num_before + len(blocks):
                num_partial = num_prompt - num_full * block_size
        has_gaps = False
        for block in blocks:
            if block.is_null:
                has_gaps = True
                break
        is_chained = not has_gaps and not (num_before > 0 and table[0].is_null)
        last: SampledBlock | None = None
        is_reached = False  # `last` is where the next block is appended
        num_lookups: i64 = num_counted
        salt = self._salt
        bound = self._bound
        index: i64 = -1
        for block in blocks:
            index += 1
            if block.is_null:
                if index < num_counted:
                    num_lookups -= 1
                continue
            key: Any = block.key
            if not isinstance(key, bytes):
                continue
            mixed: i64 = hash(key)  # already known, since the pool has just mapped the key
            mixed = ((mixed ^ salt) >> 16) & 0xFFFFFFFF
            if mixed >= bound:
                continue
            found = self.stack.blocks.get(key)
            if found is not None:
                last = found
                if index < num_counted:
                    self._count(found, self.stack.find_rank(found))
                is_reached = not is_chained
                if is_reached:
                    self.stack.access(found)
                continue
            if not is_chained:
                last = None
            elif not is_reached:
                if last is not None:
                    self.stack.access(last)
                else:
                    last = self._reach(table, num_before - 1)
                is_reached = True
            replica = mixed & 7
            last = self.stack.append(last, key, replica)
            if index < num_counted:
                self.counts[replica * ROW + NUM_STEPS + 1] += self.weight
        if last is not None and not is_reached:
            self.stack.access(last)
        self._add_lookups(0, num_lookups, num_partial)

    def note_reset(self) -> None:
        """Handle a reset: no pool has a hit of an earlier block. Counts stay."""
        self.stack = SampledStack(self.stack.limit)

    def note_resized(self, num_blocks: int) -> None:
        """Start again, since distances are in multiples of the capacity."""
        self.capacity = num_blocks - 1
        self.restart()

    # ---- steps of these calls ----------------------------------------------------------------------

    def _note_touched_singly(self, listed: list[KVCacheBlock]) -> i64:
        """Handle hits that do not need the blocks before them. Return their number."""
        num_blocks: i64 = 0
        for block in listed:
            if block.is_null:
                continue
            num_blocks += 1
            key: Any = block.key
            found = None if key is None else self.stack.blocks.get(key)
            if found is not None:
                self._count(found, self.stack.find_rank(found))
                self.stack.access(found)
        return num_blocks

    def _find_deepest(self, table: Any, position: i64) -> SampledBlock | None:
        """Return the last block of the sample in a table, from this position backwards."""
        tracked = self.stack.blocks
        while position >= 0:
            block: KVCacheBlock = table[position]
            key: Any = block.key
            if key is not None:
                found = tracked.get(key)
                if found is not None:
                    return found
            position -= 1
        return None

    def _reach(self, table: Any, position: i64) -> SampledBlock | None:
        """Return the sampled block behind which the blocks after this position of a table are appended.

        If it was used recently, it stays where it is: a request that generates block after block does not
        move its whole chain each time.
        """
        last = self._find_deepest(table, position)
        if last is not None and not self.stack.is_open(last, self._max_above):
            self.stack.access(last)
        return last

    def _count(self, block: SampledBlock, rank: int) -> None:
        """Count a look-up of a block that had this rank in the stack."""
        # The blocks above it in the sample stand for 1 / rate blocks each.
        distance = 1 + (rank - 1) / self.rate
        step = min(NUM_STEPS + 1, ceil(distance * STEPS_PER_CAPACITY / self.capacity - 1e-9))
        self.counts[block.replica * ROW + step] += self.weight

    def _add_lookups(self, num_hits: int, num_blocks: int, num_partial_tokens: int) -> None:
        """Add look-ups to the sums; `num_partial_tokens` are prompt tokens behind the last full block."""
        weight = self.weight
        self.hit_blocks += weight * num_hits
        self.looked_up_blocks += weight * num_blocks
        self.hit_tokens += weight * (num_hits * self.block_size)
        self.looked_up_tokens += weight * (num_blocks * self.block_size + num_partial_tokens)
        self._until_next_period -= num_blocks
        while self._until_next_period <= 0:
            self._start_period()

    def _start_period(self) -> None:
        self._until_next_period += self.period
        self.weight *= _GROWTH
        self.period_starts.append(self._clock())
        if len(self.period_starts) > _PERIODS_PER_HALF_LIFE:
            del self.period_starts[0]
        if self.weight > _MAX_WEIGHT:
            scale = 1 / self.weight
            self.counts = [count * scale for count in self.counts]
            self.looked_up_blocks *= scale
            self.hit_blocks *= scale
            self.looked_up_tokens *= scale
            self.hit_tokens *= scale
            self.weight = 1.0
