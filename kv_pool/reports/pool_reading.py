"""`PoolReading`: the counters and levels of a running pool, which every monitoring of it shows.

`read_pool` makes one from `PoolSources` in microseconds of the pool's lock, whatever the size of the pool:

    metrics, health, kv-pool top, page, history  <-  PoolReading  <-  PoolSources: pool, tiers, publisher
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from kv_pool.contiguous.fragmentation import find_run_length
from kv_pool.contiguous.run_index import EMPTY, IN_USE
from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH, RunBlockPool
from kv_pool.core.holds import HoldState
from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import ControlError
from kv_pool.events.event_publisher import EventPublisher, PublisherStatistics
from kv_pool.reports.controlled_pool import ControlledPool, Manager, count_use
from kv_pool.reports.histogram import Histogram
from kv_pool.reports.statistics import PoolCounts, count_blocks
from kv_pool.reports.tiers import TierList, TierStatistics


class PoolReading(PoolCounts, frozen=True, kw_only=True):
    """The counters and levels of a pool at one moment. Counters only grow while the pool lives.

    What the pool does not count is None, {} or empty.

    Attributes:
        time_s: seconds since the epoch.
        name, model_name, engine: as in `PoolSources`.
        cached_blocks: free blocks that can still be hit; None for a pool without an index of runs.
        cached_keys: keys in the prefix cache, of free blocks and of those in use.
        fragmentation_rate: share of the possible free runs that is lost to scattering, 0 to 1.
        largest_free_run: length of the longest run of free blocks.
        free_runs: number of free runs by the largest power of two that fits into them.
        looked_up_tokens, hit_tokens: tokens that were looked up so far, and those of them that were cached.
        evictions: evicted cache keys so far by cause: "reuse", and those of `evicting.count_cause`.
        holds: blocks under holds by kind: "open", "leased" until a deadline, "quarantined", and "watched"
            until their reuse. A block under two holds counts twice.
        leases: number of holds with a deadline by state: "active", "quarantined".
        overdue_leases: leases whose deadline has passed so far.
        tiers: the lower tiers, fastest first.
        hit_blocks_by_medium: blocks with which requests started so far.
        dropped_blocks: evicted blocks that were offloaded to no tier so far.
        migrations: running migrations by phase, and ended ones so far.
        stream: counters of the publisher; None without one.
        calls: number of calls so far: "take", "free".
        latencies: durations of a sample of the calls: "take", "free", "lookup".
        ages: time since the last use of a sample of blocks, as "hit GPU", "evict GPU", "hit CPU", ...
        invariant_checks, invariant_failures: checks of the pool's invariants so far, and failed ones.
        interrupted_calls: interrupted calls so far.
        is_interrupted: the last call was interrupted, and the pool needs `repair`.
        refused_requests: requests that the pool's server has refused so far, by reason; see `ControlServer`.
    """

    time_s: float
    name: str
    model_name: str
    engine: str
    cached_blocks: int | None = None
    cached_keys: int = 0
    fragmentation_rate: float | None = None
    largest_free_run: int | None = None
    free_runs: dict[int, int] | None = None
    looked_up_tokens: int | None = None
    hit_tokens: int | None = None
    evictions: dict[str, int]
    holds: dict[str, int]
    leases: dict[str, int]
    overdue_leases: int = 0
    tiers: list[TierStatistics]
    hit_blocks_by_medium: dict[str, int]
    dropped_blocks: int = 0
    migrations: dict[str, int]
    stream: PublisherStatistics | None = None
    calls: dict[str, int]
    latencies: dict[str, Histogram]
    ages: dict[str, Histogram]
    invariant_checks: int = 0
    invariant_failures: int = 0
    interrupted_calls: int = 0
    is_interrupted: bool = False
    refused_requests: dict[str, int]

    @property
    def usage(self) -> float:
        """Share of the blocks that is in use, 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the looked up tokens that was cached, since the start; None if none was looked up."""
        return (self.hit_tokens or 0) / self.looked_up_tokens if self.looked_up_tokens else None

    @property
    def blocks_by_state(self) -> dict[str, int]:
        """The blocks that are used, cached or empty; used or free without an index of runs."""
        if self.cached_blocks is None:
            return {"used": self.used_blocks, "free": self.free_blocks}
        num_empty = self.free_blocks - self.cached_blocks
        return {"used": self.used_blocks, "cached": self.cached_blocks, "empty": num_empty}

    @property
    def used_tokens(self) -> int:
        """The slots of the blocks in use."""
        return self.used_blocks * self.block_size

    @property
    def total_tokens(self) -> int:
        """The slots of all blocks."""
        return self.total_blocks * self.block_size

    @property
    def size(self) -> dict[str, int]:
        """1, by the block size and the number of blocks with the null block: labels of an info metric."""
        return {f"{self.block_size} {self.total_blocks + 1}": 1}

    @property
    def tier_looked_up_tokens(self) -> int | None:
        """The tokens that were not cached in the pool, but looked up in tiers; None without tiers."""
        if not self.tiers or self.looked_up_tokens is None:
            return None
        return self.looked_up_tokens - (self.hit_tokens or 0)

    @property
    def tier_hit_tokens(self) -> int | None:
        """The tokens that lower tiers had; None without tiers."""
        hits = [num for medium, num in self.hit_blocks_by_medium.items() if medium != MEDIUM_GPU]
        return sum(hits) * self.block_size if self.tiers else None


class CountsMigrations(Protocol):
    """A node, such as `Migrator`."""

    def count_migrations(self) -> dict[str, int]:
        """Return the running migrations by phase, and the ended ones so far."""

    def list_migrations(self) -> Sequence[Any]:
        """Return the status of the running migrations and of the last ones that ended, oldest first."""


@dataclass(frozen=True, kw_only=True)
class PoolSources:
    """The sources of a reading: a pool, and its tiers, publisher and node.

        sources = PoolSources(pool=gpu_pool, publisher=publisher, model_name="qwen3-8b")
        print(read_pool(sources).usage)

    Args:
        pool: a `ControlledPool` such as `GPUKVPool`, a `BlockPool` or a `KVCacheManager`.
        lock: held while the pool is read; None for the pool's own, which a `BlockPool` and a
            `KVCacheManager` do not have: read these in the thread that uses them, or pass its lock.
        tiers: returns the report of the lower tiers, such as `LiveTiers.get_report`.
        node: the migrator of the pool.
        ages: returns the ages of blocks, such as `BlockAges.get_histograms`.
        refusals: `ControlServer.refusals`.
        name: of the pool, as a label.
        model_name, engine: as labels; "" for those of the pool. `engine` is the index of an engine's core.
    """

    pool: "ControlledPool[Any] | BlockPoolCore | Manager"
    lock: AbstractContextManager[object] | None = None
    tiers: Callable[[], TierList] | None = None
    publisher: EventPublisher | None = None
    node: CountsMigrations | None = None
    ages: Callable[[], Mapping[str, Histogram]] | None = None
    refusals: Mapping[str, int] | None = None
    name: str = ""
    model_name: str = ""
    engine: str = ""

    @property
    def labels(self) -> tuple[str, str]:
        """The model name and the engine of a reading."""
        return (
            self.model_name or getattr(self.pool, "model_name", ""),
            self.engine or getattr(self.pool, "engine", "0"),
        )

    @property
    def block_pool(self) -> BlockPoolCore:
        """The blocks of the pool."""
        return self.pool if isinstance(self.pool, BlockPoolCore) else self.pool.block_pool

    @property
    def held_lock(self) -> AbstractContextManager[object]:
        """The lock to hold while the pool is read."""
        own = self.pool.lock if isinstance(self.pool, ControlledPool) else nullcontext()
        return self.lock or own


def read_pool(sources: PoolSources, *, clock: Callable[[], float] = time.time) -> PoolReading:
    """Return a reading of a pool, its tiers, its publisher and its node.

    Cost: the pool's lock is held for O(holds), and a copy of one byte per block where the pool has an index
    of runs; 0.1 ms at a million blocks. The runs are measured after that, without the lock.
    """
    pool, blocks = sources.pool, sources.block_pool
    block_size = blocks.hash_block_size if isinstance(pool, BlockPoolCore) else pool.block_size
    counts: dict[str, Any] = {"run_length": DEFAULT_RUN_LENGTH, "calls": {}, "latencies": {}}
    with sources.held_lock:
        ages = bytes(blocks.run_index.ages) if isinstance(blocks, RunBlockPool) else None
        if isinstance(pool, ControlledPool):
            counts |= pool.count_use()
            counts["latencies"] = {call: one.histogram.copy() for call, one in pool.latencies.items()}
            counts["calls"] = {
                call: one.count_calls() for call, one in pool.latencies.items() if call != "lookup"
            }
        elif not isinstance(pool, BlockPoolCore):
            counts |= count_use(pool)
        counts |= count_blocks(blocks) | _count_holds(blocks)
    if ages is not None:
        counts |= _measure_runs(ages, counts["run_length"])
    counts.pop("taken_events", None)
    for kind in ("looked_up", "hit"):
        num_blocks = counts.pop(f"{kind}_blocks", None)
        counts[f"{kind}_tokens"] = None if num_blocks is None else num_blocks * block_size
    tiers = TierList({}, []) if sources.tiers is None else sources.tiers()
    model_name, engine = sources.labels
    return PoolReading(
        time_s=clock(),
        name=sources.name,
        model_name=model_name,
        engine=engine,
        block_size=block_size,
        tiers=tiers.tiers,
        hit_blocks_by_medium=tiers.hit_blocks,
        dropped_blocks=tiers.num_dropped,
        migrations={} if sources.node is None else sources.node.count_migrations(),
        stream=None if sources.publisher is None else sources.publisher.get_statistics(),
        ages={} if sources.ages is None else dict(sources.ages()),
        refused_requests=dict(sources.refusals or {}),
        **counts,
    )


def read_pools(sources: Iterable[PoolSources]) -> list[PoolReading]:
    """Return a reading of each pool whose engine is not gone. See `read_pool` for the cost."""
    readings = []
    for one in sources:
        with suppress(ControlError):
            readings.append(read_pool(one))
    return readings


def _count_holds(pool: BlockPoolCore) -> dict[str, Any]:
    """Return the fields of a reading about holds, the prefix cache and interrupted calls. O(holds)."""
    causes = dict(pool.evictions_by_cause)
    holds = {"open": 0, "leased": 0, "quarantined": 0, "watched": len(pool.reuse_watchers)}
    leases = {"active": 0, "quarantined": 0}
    for hold in pool.holds.list_holds():
        kind = "open" if hold.until is None else "leased"
        if hold.state is HoldState.QUARANTINED:
            kind = "quarantined"
        holds[kind] += hold.num_blocks
        if kind != "open":
            leases["active" if kind == "leased" else kind] += 1
    return {
        "cached_keys": len(pool.cached_block_hash_to_block.entries),
        "evictions": {"reuse": pool.num_evictions - sum(causes.values())} | causes,
        "holds": holds,
        "leases": leases,
        "overdue_leases": pool.holds.num_overdue,
        "invariant_checks": pool.num_checks,
        "invariant_failures": pool.num_failed_checks,
        "interrupted_calls": pool.num_repairs + pool.is_changing,
        "is_interrupted": pool.is_changing,
    }


def _measure_runs(ages: bytes, run_length: int) -> dict[str, Any]:
    """Return the fields of a reading about free runs, and about cached blocks. O(number of blocks).

    NumPy releases the GIL meanwhile.

    Args:
        ages: a copy of the ages of a `FreeRunIndex`.
    """
    import numpy as np

    of_block = np.frombuffer(ages, np.uint8)
    is_free = of_block != IN_USE  # never the null block, at 0
    ends = np.flatnonzero(is_free[1:] != is_free[:-1])
    if is_free[-1]:
        ends = np.append(ends, len(of_block) - 1)
    lengths = ends[1::2] - ends[::2]
    num_free = int(lengths.sum())
    k = find_run_length(num_free, run_length)
    orders = np.bincount(np.frexp(lengths)[1])
    return {
        "cached_blocks": int(np.count_nonzero(of_block > EMPTY)),
        "fragmentation_rate": 1 - int((lengths // k).sum()) / (num_free // k) if num_free else 0.0,
        "largest_free_run": int(lengths.max(initial=0)),
        "free_runs": {1 << order - 1: int(count) for order, count in enumerate(orders) if count},
    }
