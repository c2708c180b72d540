"""`PoolControl`: the answers and refusals of the control socket of a vLLM engine core."""

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import msgspec

from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.control.server import ControlServer
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.environment import CONTROL, LEVEL
from kv_pool.errors import ControlError, OutOfThreadsError
from kv_pool.ids import GroupId, NodeName, RequestId
from kv_pool.manager.engine.engine_manager import EngineManager
from kv_pool.reports.layout import PoolLayout, read_layout
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.statistics import PoolStatistics, read_fragmentation_rate, read_statistics

logger = logging.getLogger("vllm.kv_pool")

_NOTHING_MOVES = (
    "blocks of vLLM cannot be moved: its scheduler and workers keep their ids, and its workers the bytes. "
    "Use an engine over a GPUKVPool or a KVCacheManager to compact or migrate"
)


class PoolControl:
    """The pool of a vLLM engine core, for a `ControlServer`; implements `ControlledPool`.

    Args:
        pool: referenced weakly, so that the socket does not keep a discarded engine's pool alive.

    Attributes:
        lock: held during each vLLM call that changes the pool.
    """

    run_length = DEFAULT_RUN_LENGTH

    def __init__(self, pool: BlockPool) -> None:
        self.lock = threading.RLock()
        self._pool = weakref.ref(pool)
        self._manager: weakref.ref[EngineManager] | None = None
        self._num_taken_events: Counter[str] = Counter()
        self._num_looked_up_blocks = 0
        self._num_hit_blocks = 0

    @property
    def block_pool(self) -> BlockPool:
        pool = self._pool()
        if pool is None:
            raise ControlError("the engine of this pool is gone; retry after the next one has started")
        return pool

    def note_manager(self, manager: EngineManager) -> None:
        """Answer questions about requests by the block tables of this manager, referenced weakly."""
        self._manager = weakref.ref(manager)

    def _get_manager(self) -> EngineManager | None:
        return None if self._manager is None else self._manager()

    def _list_tables(self) -> dict[RequestId, list[list[KVCacheBlock]]]:
        """Return the block tables by request; {} if vLLM's own manager has them."""
        manager = self._get_manager()
        if manager is None:
            return {}
        group_ids = [GroupId(group_id) for group_id in range(manager.num_kv_cache_groups)]
        found = manager.manager
        return {
            request_id: [found.get_table(request_id, group_id).blocks for group_id in group_ids]
            for request_id in found.list_request_ids()
        }

    def note_lookup(self, num_blocks: int, num_hits: int) -> None:
        """Count blocks that a request has looked up, and those of them that it hit."""
        self._num_looked_up_blocks += num_blocks
        self._num_hit_blocks += num_hits

    def note_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Count blocks that a request has hit; only under vLLM's own manager, whose look-ups are not seen."""
        if self._manager is None:
            num_hits = sum([not block.is_null for block in blocks])
            self.note_lookup(num_hits, num_hits)

    def note_cached(self, request: Any, start: int, end: int, block_size: int) -> None:
        """Count the prompt blocks in [start, end), just computed, as looked up and not hit; see above."""
        if self._manager is None:
            num_in_prompt = request.num_prompt_tokens // block_size
            self.note_lookup(max(0, min(end, num_in_prompt) - start), 0)

    def note_taken_events(self, events: Iterable[object]) -> None:
        """Count events that vLLM has taken, by class name."""
        self._num_taken_events.update(type(event).__name__ for event in events)

    def get_statistics(self) -> PoolStatistics:
        """Return the pool's statistics; for requests and latencies see vLLM's metrics. O(blocks)."""
        with self.lock:
            pool = self.block_pool
            known = read_statistics(pool, block_size=pool.hash_block_size, run_length=self.run_length)
            known = msgspec.structs.replace(
                known,
                taken_events=dict(self._num_taken_events),
                looked_up_blocks=self._num_looked_up_blocks,
                hit_blocks=self._num_hit_blocks,
            )
            manager = self._get_manager()
            if manager is None:
                return known
            retention = manager.manager.retention
            return msgspec.structs.replace(
                known,
                pinned_blocks=0 if retention is None else retention.num_pins,
                reserved_blocks=manager.watermark_blocks,
                num_sequences=len(self._list_tables()),
            )

    def get_layout(self) -> PoolLayout:
        """Return the states of the blocks, at level `manager` with the runs of requests. O(blocks)."""
        with self.lock:
            pool = self.block_pool
            rows = [row for tables in self._list_tables().values() for row in tables]
            return read_layout(
                pool, rows, block_size=pool.hash_block_size, run_length=self.run_length, device_id=0
            )

    def describe_sequences(self) -> SequenceList:
        """Return a report of each request with blocks, in the order of admission.

        Raises:
            ControlError: vLLM's own manager has the block tables, as at level `pool`.
        """
        if self._manager is None:
            raise ControlError(
                "the block tables of requests are in vLLM's scheduler, not in the pool; use stats, layout or "
                f"sequences --holds, set {LEVEL}=manager, or read vLLM's metrics"
            )
        with self.lock:
            immovable_ids = set(self.block_pool.holds.list_immovable_ids())
            reports = []
            for request_id, tables in self._list_tables().items():
                ids = [block.block_id for row in tables for block in row if not block.is_null]
                reports.append(
                    SequenceReport(
                        sequence_id=request_id,
                        num_blocks=len(ids),
                        priority=None,
                        idle_s=None,
                        is_in_transit=False,
                        num_immovable_blocks=sum(block_id in immovable_ids for block_id in ids),
                    )
                )
            return SequenceList(reports)

    def get_fragmentation_rate(self) -> float:
        """Return the fraction of possible runs of `run_length` that is lost to fragmentation, 0 to 1."""
        with self.lock:
            return read_fragmentation_rate(self.block_pool, self.run_length)

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> NoReturn:
        """Raise ControlError: blocks of vLLM cannot be moved."""
        raise ControlError(_NOTHING_MOVES)


def open_socket(pool: BlockPool, control: PoolControl, setting: str) -> None:
    """Serve a pool until it is discarded or the process ends. A failure is logged; the engine continues.

    Args:
        setting: "1" for the default socket of a node `vllm-PID`, otherwise the path of the socket.
    """
    try:
        server = ControlServer(
            control,
            None if setting == "1" else setting,
            node_name=NodeName(f"vllm-{os.getpid()}"),
            why_no_node=_NOTHING_MOVES,
        )
        server.start()
    except (ControlError, OutOfThreadsError) as error:
        own = "" if setting == "1" else f". With {CONTROL}=1 each engine process has its own"
        logger.warning("kv_pool could not open a control socket: %s%s", error, own)
        return
    weakref.finalize(pool, _stop, server, os.getpid())
    logger.info("kv_pool answers at %s: kv-pool stats --socket %s", server.path, server.path)


def _stop(server: ControlServer, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked child must not remove its parent's socket
        server.stop()
