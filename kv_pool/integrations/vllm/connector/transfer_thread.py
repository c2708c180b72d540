"""`TransferThread`: executes orders in the background; loads overtake stores."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId
from kv_pool.integrations.vllm.connector.device_order import DeviceOrder, Mark
from kv_pool.integrations.vllm.connector.orders import LoadOrder, StoreOrder, WorkerReport
from kv_pool.integrations.vllm.connector.worker_tiers import WorkerTiers
from kv_pool.threads import start_thread

_logger = logging.getLogger("vllm.kv_pool")


class Loaded(NamedTuple):
    """A finished load.

    Attributes:
        request_id: the request that waits for it.
        failed: the blocks that were not loaded.
    """

    request_id: RequestId
    failed: list[BlockId]


class TransferThread:
    """A background thread that executes orders on a rank's tiers, until `close`.

    Removals and stores are executed in the order of their calls. A load is executed before all of those that
    have not begun: what it reads cannot be evicted while it waits.

    Args:
        tiers: used by the thread only, until it has ended.
        device_order: orders copies after the engine's work on the device.
        first_report: reported together with the first results.
    """

    def __init__(
        self, tiers: WorkerTiers, device_order: DeviceOrder, first_report: WorkerReport | None = None
    ) -> None:
        self._tiers = tiers
        self._device_order = device_order
        # Locked directly: an exception in `Condition.__enter__` would leave the lock held.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._loads: deque[tuple[LoadOrder, Mark]] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._is_busy = False
        self._is_closing = False
        self._loaded: list[Loaded] = []
        self._report = first_report or WorkerReport()
        self._thread = start_thread("kv_pool transfers", self._run)

    def clear(self) -> None:
        """Queue the removal of everything."""
        self._add_task(self._clear)

    def remove(self, keys: Sequence[BlockHashWithGroupId]) -> None:
        """Queue the removal of keys."""
        self._add_task(partial(self._tiers.remove, keys))

    def store(self, orders: Sequence[StoreOrder]) -> None:
        """Queue stores. They read what the engine's work that is queued on the device by now will write."""
        mark = self._device_order.mark()
        for order in orders:
            self._add_task(partial(self._store, order, mark))

    def load(self, orders: Sequence[LoadOrder]) -> None:
        """Queue loads. They write after the engine's work that is queued on the device by now."""
        mark = self._device_order.mark()
        with self._mutex:
            self._loads += [(order, mark) for order in orders]
            self._changed.notify_all()

    def take_loaded(self) -> list[Loaded]:
        """Return the loads that have finished since the last call."""
        if not self._loaded:  # checked without the lock, so that a step does not wait
            return []
        with self._mutex:
            loaded, self._loaded = self._loaded, []
            return loaded

    def take_report(self) -> WorkerReport | None:
        """Return what has happened since the last call; None if nothing."""
        with self._mutex:
            if self._report.is_empty:
                return None
            report, self._report = self._report, WorkerReport()
            return report

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all orders have been executed. Return False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._loads and not self._tasks and not self._is_busy, timeout_s
            )

    def close(self) -> None:
        """Finish the current order, drop the others, and close the tiers. No-op on a second call."""
        with self._mutex:
            was_closing, self._is_closing = self._is_closing, True
            self._loads.clear()
            self._tasks.clear()
            self._changed.notify_all()
        if not was_closing:
            self._thread.join()
            self._tiers.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _add_task(self, task: Callable[[], None]) -> None:
        with self._mutex:
            if not self._is_closing:
                self._tasks.append(task)
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._loads or self._tasks or self._is_closing)
                if self._is_closing:
                    return
                self._is_busy = True
                load = self._loads.popleft() if self._loads else None
                task = None if load is not None else self._tasks.popleft()
            if load is not None:
                self._load(*load)
            elif task is not None:
                try:
                    task()
                except Exception:
                    _logger.exception("kv_pool could not remove blocks from a tier")

    def _load(self, order: LoadOrder, mark: Mark) -> None:
        try:
            with self._device_order.after(mark):
                failed = self._tiers.load(order)
        except Exception:  # such as MemoryError; the engine computes the blocks
            _logger.exception("kv_pool could not load %d blocks", len(order.blocks))
            failed = order.blocks
        with self._mutex:
            self._loaded.append(Loaded(order.request_id, [block_id for _, block_id in failed]))
            self._report.lost.update(key for key, _ in failed)

    def _store(self, order: StoreOrder, mark: Mark) -> None:
        try:
            with self._device_order.after(mark):
                lost = self._tiers.store(order)
        except Exception:  # such as MemoryError; the blocks are not cached in a tier
            _logger.exception("kv_pool could not store %d blocks", len(order.blocks))
            lost = [*order.demoted, *(key for key, _ in order.blocks)]
        with self._mutex:
            self._report.stored[order.order_id] = 1
            self._report.lost.update(lost)

    def _clear(self) -> None:
        self._tiers.clear()
        with self._mutex:
            self._report.has_lost_disk = self._tiers.has_lost_disk
