"""`BlockAges`: how long after their last use cached blocks are hit or evicted, from a sample of them."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kv_pool.closing import Running
from kv_pool.core.arguments import as_count
from kv_pool.core.deadlines import read_clock
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import KVPoolError
from kv_pool.ids import BlockHashWithGroupId
from kv_pool.reports.histogram import AGE_BOUNDS_S, Histogram
from kv_pool.threads import start_thread

_TRIES = 2
"""Blocks drawn at a look for each key that the sample lacks."""


@dataclass(slots=True)
class _Seen:
    """The last look at a key: its medium, its first and last use, and whether it was in use."""

    medium: str
    first_s: float
    last_s: float
    is_used: bool


class BlockAges(Running):
    """The ages of a sample of cached blocks: in the pool, and in the lower tiers of its `lower_tiers`.

        with BlockAges(lambda: pool.block_pool) as ages:
            sources = PoolSources(pool=pool, ages=ages.get_histograms)

    The calls of the pool note nothing. A thread looks at the sample every `period_s`, for about 0.05 ms. So
    an age is exact to a period, and a block that is hit again within one is not counted.

    The thread does not take the lock of the pool: an engine that gives it back for a moment only would wake
    the thread at every step, and lose more time by that than by the look. What it reads of a block is whole;
    a block that is being moved at that moment may be counted as evicted.

    Args:
        find_pool: returns the pool; it is called at each look, so that its owner may refer to it weakly.
        period_s: seconds between two looks of the thread. Without the thread, call `look`.
        num_keys: number of cache keys in the sample; each is a key that was in use when it was drawn, and
            stays until nothing has it any more.
        clock: returns the time in seconds.

    | name | time |
    |---|---|
    | `hit GPU`, `hit CPU`, ... | from the last use to the next one, by the medium that had the block |
    | `evict GPU`, `evict CPU`, ... | from the last use to the eviction from that medium |
    | `life GPU` | from the first use to the eviction from the pool |
    """

    def __init__(
        self,
        find_pool: Callable[[], BlockPoolCore],
        *,
        period_s: float = 0.25,
        num_keys: int = 256,
        clock: Callable[[], float] = read_clock,
        seed: int | None = None,
    ) -> None:
        self._find_pool = find_pool
        self._period_s = period_s
        self._num_keys = as_count("num_keys", num_keys, 1)
        self._clock = clock
        self._draw = random.Random(seed)
        self._sample: dict[BlockHashWithGroupId, _Seen] = {}
        self._histograms: dict[str, Histogram] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Raises OutOfThreadsError."""
        self._stopping.clear()
        self._thread = start_thread("kv_pool block ages", self._run)

    def stop(self) -> None:
        """Stop the thread. The ages stay."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            with suppress(KVPoolError, LookupError, RuntimeError):  # its engine is gone, or it met a change
                self.look()

    def get_histograms(self) -> dict[str, Histogram]:
        """Return copies of the ages so far."""
        return {name: one.copy() for name, one in list(self._histograms.items())}

    def look(self) -> None:
        """Find each key of the sample, note what happened to it, and draw others for those that are gone."""
        pool, now = self._find_pool(), self._clock()
        for key, seen in list(self._sample.items()):
            self._follow(pool, key, seen, now)
        blocks = pool.blocks
        for _ in range(_TRIES * (self._num_keys - len(self._sample))):
            block = blocks[self._draw.randrange(len(blocks))]
            key = block.key
            if block.ref_cnt > 0 and key is not None and len(self._sample) < self._num_keys:
                self._sample.setdefault(key, _Seen(MEDIUM_GPU, now, now, True))

    def _follow(self, pool: BlockPoolCore, key: BlockHashWithGroupId, seen: _Seen, now: float) -> None:
        block = pool.cached_block_hash_to_block.get_one_block(key)
        medium = MEDIUM_GPU if block is not None else _find_lower(pool, key)
        is_used = block is not None and block.ref_cnt > 0
        if block is None and medium != seen.medium:
            self._note(f"evict {seen.medium}", now - seen.last_s)
            if seen.medium == MEDIUM_GPU:
                self._note("life GPU", now - seen.first_s)
        elif block is not None and (medium != seen.medium or (is_used and not seen.is_used)):
            self._note(f"hit {seen.medium}", now - seen.last_s)
            seen.last_s = now
        if not medium:
            del self._sample[key]
        seen.medium, seen.is_used = medium, is_used
        if is_used:
            seen.last_s = now

    def _note(self, name: str, seconds: float) -> None:
        if name not in self._histograms:
            self._histograms[name] = Histogram.make(AGE_BOUNDS_S)
        self._histograms[name].note(seconds)


def _find_lower(pool: BlockPoolCore, key: BlockHashWithGroupId) -> str:
    """Return the fastest lower tier that has the key; "" for none."""
    tiers: Any = getattr(pool.lower_tiers, "tiers", ())
    return next((tier.medium for tier in tiers if key in tier), "")
