"""`OrderThread`: a background thread that executes orders to copy blocks, one at a time."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)

Order = Callable[[], None]


class OrderThread:
    """Executes orders in the order in which they were added, urgent ones before all others.

    An order that raises is logged, and the next one follows. Only `wait` and `close` block.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Locked directly: an exception in `Condition.__enter__` would leave the lock held.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._urgent: deque[Order] = deque()
        self._others: deque[Order] = deque()
        self._is_busy = False
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. No-op if it runs.

        Raises:
            OutOfThreadsError: the system cannot start another thread. Nothing has changed.
        """
        if self._thread is None:
            self._thread = start_thread(self._name, self._run)

    def add(self, orders: Iterable[Order], *, is_urgent: bool = False) -> None:
        """Add orders. No-op after `close`."""
        with self._mutex:
            if not self._is_closing:
                (self._urgent if is_urgent else self._others).extend(orders)
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all orders have been executed. Return False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._urgent and not self._others and not self._is_busy, timeout_s
            )

    def close(self) -> None:
        """Drop the orders that have not begun, and wait for the current one. No-op on a second call."""
        with self._mutex:
            self._is_closing = True
            self._urgent.clear()
            self._others.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._urgent or self._others or self._is_closing)
                if self._is_closing:
                    return
                self._is_busy = True
                order = self._urgent.popleft() if self._urgent else self._others.popleft()
            try:
                order()
            except Exception:
                _logger.exception("an order of the thread %r failed", self._name)
