"""`Health`: whether a served pool is ready for requests: its invariants, publisher, tiers and peers."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kv_pool.control.commands import PoolCommands
from kv_pool.control.messages import TierList
from kv_pool.core.invariants import check_slice
from kv_pool.threads import REST_S, Workers

if TYPE_CHECKING:
    from kv_pool.control.live_node import LiveNode
    from kv_pool.events.event_publisher import EventPublisher

_FRESH_S = 0.5
_STALE_S = 10.0
_WINDOW_S = 60.0
_SLICE_BLOCKS = 256
_NUM_SLICES = 16


class HealthReport(msgspec.Struct, frozen=True):
    """The answer of `/ready`.

    Attributes:
        checks: "ok" or the problem, by what was checked: "pool", and "publisher", "tiers" and "peers" where
            the pool has them.
    """

    is_ready: bool
    checks: dict[str, str]


class Health:
    """The checks of `/ready`.

        pool       no call was interrupted, and the next 4,096 blocks satisfy `invariants.check_slice`
        publisher  no batch of events was dropped or failed in the last minute
        tiers      no block could not be written in the last minute
        peers      every known node answers

    A check runs in a thread at most twice a second, however often it is asked for. It holds the lock of the
    pool for 256 blocks at a time, a fraction of a millisecond, and goes through all blocks in turn. What was
    found wrong is checked again until it is right.
    """

    def __init__(
        self, commands: PoolCommands, workers: Workers, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = commands.pool
        self._workers = workers
        self._clock = clock
        self._running: Future[None] | None = None
        self._report = HealthReport(False, {"pool": "not checked yet"})
        self._checked_at = clock()
        self._first = 0
        self._counts: dict[str, tuple[int, float]] = {}
        self._checks = {"pool": self._check_pool}
        if commands.sources.publisher is not None:
            self._checks["publisher"] = partial(self._check_publisher, commands.sources.publisher)
        if commands.sources.tiers is not None:
            self._checks["tiers"] = partial(self._check_tiers, commands.sources.tiers)
        if commands.node is not None:
            self._checks["peers"] = partial(_check_peers, commands.node)

    async def get_report(self) -> HealthReport:
        """Return the latest report, after at most half a second.

        If no check has ended for ten seconds, such as while the engine keeps the lock, the pool is not ready.
        """
        is_fresh = self._clock() - self._checked_at < _FRESH_S
        if self._running is None or (self._running.done() and not is_fresh):
            self._running = self._workers.submit(self._check)
        await asyncio.wait([asyncio.wrap_future(self._running)], timeout=_FRESH_S)
        if self._clock() - self._checked_at < _STALE_S:
            return self._report
        return HealthReport(False, {"pool": f"no check has ended for {_STALE_S:.0f} s; is its lock held?"})

    def _check(self) -> None:
        found = {}
        for name, check in self._checks.items():
            try:
                found[name] = check()
            except Exception as error:  # of a caller's function, too
                found[name] = f"{type(error).__name__}: {error}"
        self._report = HealthReport(set(found.values()) == {"ok"}, found)
        self._checked_at = self._clock()

    def _check_pool(self) -> str:
        for _ in range(_NUM_SLICES):
            with self._pool.lock:
                blocks = self._pool.block_pool
                first = self._first if self._first < len(blocks.blocks) else 0
                check_slice(blocks, first, _SLICE_BLOCKS)
            self._first = first + _SLICE_BLOCKS
            time.sleep(REST_S)
        return "ok"

    def _check_publisher(self, publisher: "EventPublisher") -> str:
        found = publisher.get_statistics()
        lost = found.num_batches_dropped + found.num_batches_failed
        return self._watch("publisher", lost, "batches of events were dropped or failed")

    def _check_tiers(self, tiers: Callable[[], TierList]) -> str:
        errors = sum(tier.num_write_errors for tier in tiers().tiers)
        return self._watch("tiers", errors, "blocks could not be written")

    def _watch(self, name: str, count: int, problem: str) -> str:
        """Return the problem if the count has grown in the last minute, or "ok"."""
        before, grew_at = self._counts.get(name, (count, -_WINDOW_S))
        if count > before:
            grew_at = self._clock()
        self._counts[name] = count, grew_at
        has_grown = self._clock() - grew_at < _WINDOW_S
        return f"{problem} in the last minute; so far: {count}" if has_grown else "ok"


def _check_peers(node: "LiveNode") -> str:
    silent = [f"{peer.name}: {peer.error}" for peer in node.list_peers().peers if peer.error]
    return "; ".join(silent) or "ok"
