"""`TierWorker`: the worker half of the tiers of one rank; loads overtake stores."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kv_pool.errors import OutOfThreadsError, TierError
from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId
from kv_pool.integrations.vllm.connector.tier_index import LoadOrder, StepOrders, StoreOrder, WorkerReport
from kv_pool.loggers import get_logger
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.threads import Workers
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import TierStack, TierStep

_logger = get_logger(__name__)


class TierWorker:
    """Executes the orders of each step on a rank's tiers, in a background thread, until `close`.

    If the system cannot start a thread, it executes them in the engine's, and logs a warning.

    Removals and stores are executed in the order of their calls. A load is executed before all of those that
    have not begun: what it reads cannot be evicted while it waits. Whatever cannot be copied is reported as
    lost and raises no error.

    Args:
        storage: the bytes of the GPU blocks.
        host_blocks: capacity of the host tier.
        disk: the disk tier, or None.

    Attributes:
        stack: the tiers; used only by what executes orders, until `close`.
    """

    def __init__(self, storage: BlockStorage, host_blocks: int, disk: DiskTier | None) -> None:
        host = HostTier(host_blocks, storage)
        self.stack = TierStack([host] if disk is None else [host, disk])
        self._storage = storage
        self._stream: Any = None  # of the copies, on a GPU
        self._mutex = threading.Lock()
        self._loaded: list[tuple[RequestId, list[BlockId]]] = []  # finished loads, and what they lack
        self._failed: dict[RequestId, list[BlockId]] = {}
        self._report = WorkerReport(reopened=None if disk is None else disk.list_keys())
        self._is_closed = False
        self._thread = Workers("kv_pool transfers", 1)
        self._urgent: deque[Callable[[], None]] = deque()  # orders that have not begun
        self._others: deque[Callable[[], None]] = deque()

    def start_loads(self, orders: StepOrders) -> None:
        """Start a step's loads. They write after the engine's work that is queued on the device by now."""
        if orders.loads:
            mark = self._mark()
            for order in orders.loads:
                self._start(self._urgent, partial(self._load, order, mark))

    def start_stores(self, orders: StepOrders) -> None:
        """Start a step's removals and stores; call it after the work that writes the step's blocks."""
        if orders.clears or orders.forgotten:
            self._start(self._others, partial(self._remove, orders))
        if orders.stores:
            mark = self._mark()
            for order in orders.stores:
                self._start(self._others, partial(self._store, order, mark))

    def take_loaded(self) -> set[RequestId]:
        """Return the requests whose loads have ended since the last call, failed ones included."""
        if not self._loaded:  # checked without the lock, so that a step does not wait
            return set()
        with self._mutex:
            loaded, self._loaded = self._loaded, []
        self._failed.update((request_id, failed) for request_id, failed in loaded if failed)
        return {request_id for request_id, _ in loaded}

    def take_failed(self) -> dict[RequestId, list[BlockId]]:
        """Return what `take_loaded` found missing since the last call: the blocks of each request."""
        failed, self._failed = self._failed, {}
        return failed

    def take_report(self) -> WorkerReport | None:
        """Return what has happened since the last call; None if nothing."""
        with self._mutex:
            report, self._report = self._report, WorkerReport()
        return None if report == WorkerReport() else report

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all orders have been executed. Return False after `timeout_s` seconds."""
        return self._thread.wait(timeout_s)

    def close(self) -> None:
        """Finish the current order, drop the others, and close the tiers. No-op on a second call."""
        self._thread.stop()
        self._urgent.clear()
        self._others.clear()
        self._thread.join()
        if not self._is_closed:
            self._is_closed = True
            self.stack.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _start(self, orders: deque[Callable[[], None]], order: Callable[[], None]) -> None:
        if self._is_closed:
            return
        orders.append(order)
        try:
            self._thread.submit(self._run_orders)
        except OutOfThreadsError as error:
            _logger.warning("kv_pool copies blocks in the engine's thread: %s", error)
            self._run_orders()

    def _run_orders(self) -> None:
        while self._urgent or self._others:
            try:
                order = (self._urgent or self._others).popleft()
            except IndexError:  # dropped by `close`
                return
            try:
                order()
            except Exception:
                _logger.exception("kv_pool could not execute an order")

    def _load(self, order: LoadOrder, mark: Any) -> None:
        try:
            with self._after(mark):
                failed = self.stack.load_into(self._storage, order.blocks)
        except Exception:  # such as MemoryError; the engine computes the blocks
            _logger.exception("kv_pool could not load %d blocks", len(order.blocks))
            failed = list(order.blocks)
        with self._mutex:
            self._loaded.append((order.request_id, [order.blocks[key] for key in failed]))
            self._report.lost.update(failed)

    def _store(self, order: StoreOrder, mark: Any) -> None:
        try:
            with self._after(mark):
                lost = self._copy_down(order)
        except Exception:  # such as MemoryError; the blocks are not cached in a tier
            _logger.exception("kv_pool could not store %d blocks", len(order.blocks))
            lost = [*order.list_demoted(), *order.blocks]
        with self._mutex:
            self._report.stored[order.order_id] = 1
            self._report.lost.update(lost)

    def _copy_down(self, order: StoreOrder) -> list[BlockHashWithGroupId]:
        """Execute a store. Return the keys that are in no tier as a result of a failure."""
        lost: list[BlockHashWithGroupId] = []
        for step in order.steps:
            lost += self.stack.apply_elsewhere(step)
        stored = TierStep(0, list(order.blocks))
        return lost + self.stack.apply_elsewhere(stored, self._storage, order.blocks)

    def _remove(self, orders: StepOrders) -> None:
        """Remove blocks for good. A disk tier that cannot be cleared is closed and not used again."""
        try:
            if orders.clears:
                self.stack.clear()
        except TierError as error:
            _logger.error("kv_pool continues without its disk tier: %s", error)
            self.stack.drop_last_tier().close()
            with self._mutex:
                self._report.has_lost_disk = True
        finally:
            self.stack.remove(orders.forgotten)

    # ---- the engine's work on the device ----------------------------------------------------------

    def _mark(self) -> Any:
        """Return the end of the work that the calling thread has queued on its current stream.

        None in host memory, where work is done when a call returns.
        """
        if self._storage.device == "cpu":
            return None
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._storage.device))
        return event

    @contextmanager
    def _after(self, mark: Any) -> Iterator[None]:
        """Run the copies of the `with` statement after `mark`, on their own stream, and wait for them."""
        if mark is None:
            yield
            return
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self._storage.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
