"""`BackgroundDefragmenter`: a thread that compacts a pool while its engine runs."""

import logging
import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.errors import InvalidArgumentError
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)


class BackgroundDefragmenter:
    """A thread that calls `Defragmenter.step` until it is stopped.

        with BackgroundDefragmenter(Defragmenter(pool, max_moves=32), guard=between_steps):
            engine.run()

    Args:
        defragmenter: the defragmenter to call; do not call it elsewhere meanwhile.
        pause_s: seconds from the end of one step to the start of the next one.
        guard: held during each step, in which ids change. It must prevent the engine from using ids that it
            has read before, such as a lock that the engine holds while it prepares and runs a step. On a GPU
            the engine's streams must also wait for the copy: `BlockStorage.use_copy_stream`.

    Attributes:
        error: the exception that ended the thread; None if there was none.
    """

    def __init__(
        self,
        defragmenter: Defragmenter,
        pause_s: float = 0.01,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        if pause_s < 0:
            raise InvalidArgumentError(f"pause_s is {pause_s}; it is 0 or more")
        self.defragmenter = defragmenter
        self.pause_s = pause_s
        self.error: Exception | None = None
        self._guard = nullcontext() if guard is None else guard
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            InvalidArgumentError: the thread is already running.
            OutOfThreadsError: the system cannot start a thread.
        """
        if self._thread is not None:
            raise InvalidArgumentError("the background defragmenter is already running; stop() it first")
        self.error = None
        self._stopping.clear()
        self._thread = start_thread("kv_pool defragmenter", self._run)

    def stop(self) -> None:
        """Stop the thread after its current step. No-op if it is not running.

        Raises:
            The exception of a step that has ended the thread; it was logged then.
        """
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self.error is not None:
                raise self.error

    def __enter__(self) -> "BackgroundDefragmenter":
        self.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except Exception:
            if error is None:
                raise

    def _run(self) -> None:
        try:
            while not self._stopping.wait(self.pause_s):
                with self._guard:
                    self.defragmenter.step()
        except Exception as error:
            self.error = error
            _logger.exception("the background defragmenter has ended; no block of this step has moved")
