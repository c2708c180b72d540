"""`PoolControl`: what the control socket of a vLLM engine core answers, and what it refuses."""

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import msgspec

from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.control.server import ControlServer
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import ControlError, OutOfThreadsError
from kv_pool.reports.layout import PoolLayout, read_layout
from kv_pool.reports.sequences import SequenceList
from kv_pool.reports.statistics import PoolStatistics, read_fragmentation_rate, read_statistics

logger = logging.getLogger("vllm.kv_pool")

_NOTHING_MOVES = (
    "vLLM's scheduler and workers keep the ids of their requests' blocks, and the bytes are the workers': "
    "nothing is moved behind their back. Engines over a GPUKVPool or a KVCacheManager compact and migrate"
)


class PoolControl:
    """The pool of a vLLM engine core, as `ControlServer` sees it; see `ControlledPool`.

    Args:
        pool: referenced weakly: the socket does not keep a discarded engine's pool.

    Attributes:
        lock: held by each call of vLLM's that changes the pool.
    """

    run_length = DEFAULT_RUN_LENGTH

    def __init__(self, pool: BlockPool) -> None:
        self.lock = threading.RLock()
        self._pool = weakref.ref(pool)
        self._num_taken_events: Counter[str] = Counter()

    @property
    def block_pool(self) -> BlockPool:
        pool = self._pool()
        if pool is None:
            raise ControlError("the engine of this pool is gone; ask again after the next one has started")
        return pool

    def count_events(self, events: Iterable[object]) -> None:
        """Count events that vLLM has taken, by the names of their classes."""
        self._num_taken_events.update(type(event).__name__ for event in events)

    def get_statistics(self) -> PoolStatistics:
        """Return what the pool knows; vLLM's own metrics have requests and latencies. O(blocks)."""
        with self.lock:
            pool = self.block_pool
            known = read_statistics(pool, block_size=pool.hash_block_size, run_length=self.run_length)
            return msgspec.structs.replace(known, taken_events=dict(self._num_taken_events))

    def get_layout(self) -> PoolLayout:
        """Return the states of the blocks; which request has which block is not known. O(blocks)."""
        with self.lock:
            pool = self.block_pool
            return read_layout(
                pool, [], block_size=pool.hash_block_size, run_length=self.run_length, device_id=0
            )

    def describe_sequences(self) -> SequenceList:
        """Raise ControlError: the tables of requests are vLLM's."""
        raise ControlError(
            "the block tables of requests are in vLLM's scheduler, not in the pool; ask for stats, layout or "
            "sequences --holds, or read vLLM's metrics"
        )

    def get_fragmentation_rate(self) -> float:
        """Return the share of the possible runs of `run_length` that is lost to scattering, 0 to 1."""
        with self.lock:
            return read_fragmentation_rate(self.block_pool, self.run_length)

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> NoReturn:
        """Raise ControlError: nothing moves."""
        raise ControlError(_NOTHING_MOVES)


def open_socket(pool: BlockPool, control: PoolControl, setting: str) -> None:
    """Serve a pool until it is discarded or the process ends. A failure is logged, and the engine goes on.

    Args:
        setting: "1" for the default socket of a node `vllm-PID`, otherwise the path of the socket.
    """
    try:
        server = ControlServer(
            control,
            None if setting == "1" else setting,
            node_name=f"vllm-{os.getpid()}",
            why_no_node=_NOTHING_MOVES,
        )
        server.start()
    except (ControlError, OutOfThreadsError) as error:
        logger.warning("kv_pool opens no control socket: %s", error)
        return
    weakref.finalize(pool, _stop, server, os.getpid())
    logger.info("kv_pool answers at %s: kv-pool stats --socket %s", server.path, server.path)


def _stop(server: ControlServer, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child leaves its parent's socket alone
        server.stop()
