"""The control socket of a vLLM engine core: `PoolControl` answers, `make_controlled` opens it."""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, wraps
from multiprocessing import current_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kv_pool.contiguous.run_pool import DEFAULT_RUN_LENGTH
from kv_pool.control.controlled_manager import get_rows
from kv_pool.control.network_port import NetworkPort
from kv_pool.control.server import ControlServer
from kv_pool.control.socket_path import get_default_path, remove_dead_sockets
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.core.kv_events import MEDIUM_GPU, KVCacheEvent
from kv_pool.environment import CONTROL, CONTROL_PORT, LEVEL, find_control, find_value
from kv_pool.errors import ControlError, KVPoolError
from kv_pool.ids import NodeName, RequestId
from kv_pool.loggers import get_logger
from kv_pool.manager.engine.engine_manager import EngineManager
from kv_pool.reports.controlled_pool import ControlledPool, count_use
from kv_pool.reports.sequences import SequenceList, SequenceReport
from kv_pool.reports.tiers import TierList

if TYPE_CHECKING:
    from kv_pool.integrations.vllm.connector.tier_scheduler import TierScheduler

logger = get_logger(__name__)

_NOTHING_MOVES = (
    "blocks of vLLM cannot be moved: its scheduler and workers keep their ids, and its workers the bytes. "
    "Use an engine over a GPUKVPool or a KVCacheManager to compact or migrate"
)


class PoolControl(ControlledPool[BlockPool]):
    """The pool of a vLLM engine core, for a `ControlServer`.

    Args:
        pool: referenced weakly, so that the socket does not keep a discarded engine's pool alive.

    Attributes:
        lock: held during each vLLM call that changes the pool.
        taken_events: number of events that vLLM has taken, by class name.
        lookups: blocks that requests have looked up, and those of them that they hit.
    """

    run_length = DEFAULT_RUN_LENGTH

    def __init__(self, pool: BlockPool) -> None:
        self.lock = threading.RLock()
        self._pool = weakref.ref(pool)
        self._find_manager: Callable[[], EngineManager | None] = lambda: None
        self._find_tiers: Callable[[], TierScheduler | None] = lambda: None
        self.taken_events: Counter[str] = Counter()
        self.lookups: Counter[str] = Counter(looked_up_blocks=0, hit_blocks=0)
        # The rank of data parallelism, by the name that vLLM gives to an engine's process.
        rank = current_process().name.partition("EngineCore_DP")[2]
        self.engine = rank if rank.isdecimal() else "0"

    @property
    def block_pool(self) -> BlockPool:  # type: ignore[override]  # weak
        pool = self._pool()
        if pool is None:
            raise ControlError("the engine of this pool is gone; retry after the next one has started")
        return pool

    def note_manager(self, manager: EngineManager) -> None:
        """Answer questions about requests by the block tables of this manager, referenced weakly."""
        self._find_manager = weakref.ref(manager)

    def note_tiers(self, tiers: "TierScheduler") -> None:
        """Answer questions about tiers by the scheduler half of a connector, referenced weakly."""
        self._find_tiers = weakref.ref(tiers)

    def get_tiers(self) -> TierList:
        """Return what `kv-pool tiers` shows; no tiers without a `KVPoolConnector` that has some."""
        tiers, num_hits = self._find_tiers(), self.lookups["hit_blocks"]
        if tiers is None:
            return TierList({MEDIUM_GPU: num_hits}, [])
        return tiers.get_report(num_hits)

    @property
    def block_size(self) -> int:  # type: ignore[override]  # of the engine's pool
        return self.block_pool.hash_block_size

    def _list_ids(self) -> list[RequestId]:
        """Return the requests in the order of admission; [] if vLLM's own manager has their tables."""
        manager = self._find_manager()
        return [] if manager is None else manager.manager.list_request_ids()

    def _get_rows(self, sequence_id: RequestId) -> list[list[KVCacheBlock]] | None:
        manager = self._find_manager()
        return None if manager is None else get_rows(manager.manager, sequence_id)

    def report_sequence(self, sequence_id: RequestId, num_blocks: int, num_immovable: int) -> SequenceReport:
        return SequenceReport(sequence_id, num_blocks, None, None, False, num_immovable_blocks=num_immovable)

    def count_use(self) -> dict[str, Any]:
        manager = self._find_manager()
        of_manager = {} if manager is None else count_use(manager.manager)
        return super().count_use() | of_manager | {"taken_events": dict(self.taken_events), **self.lookups}

    def note_lookup(self, num_blocks: int, num_hits: int, *, is_seen_by_pool: bool = False) -> None:
        """Count blocks that a request has looked up, and those of them that it hit.

        Args:
            is_seen_by_pool: the pool infers it; under our own manager, which sees the look-ups, left out.
        """
        if not is_seen_by_pool or self._find_manager() is None:
            self.lookups.update(looked_up_blocks=num_blocks, hit_blocks=num_hits)

    def describe_sequences(self) -> SequenceList:
        """Return a report of each request with blocks, in the order of admission.

        Raises:
            ControlError: vLLM's own manager has the block tables, as at level `pool`.
        """
        if self._find_manager() is None:
            raise ControlError(
                "the block tables of requests are in vLLM's scheduler, not in the pool; use stats, layout or "
                f"sequences --holds, set {LEVEL}=manager, or read vLLM's metrics"
            )
        return super().describe_sequences()

    def defragment(
        self, max_evictions: int = 0, max_moves: int | None = None, goal: float | None = None
    ) -> NoReturn:
        """Raise ControlError: blocks of vLLM cannot be moved."""
        raise ControlError(_NOTHING_MOVES)


def find_socket(process_id: int) -> Path:
    """Return the socket of an engine's process: the one that is set, or that of a node `vllm-PID`."""
    setting = find_control()
    return get_default_path(NodeName(f"vllm-{process_id}")) if setting == "1" else Path(setting)


@cache
def name_models(scheduler_class: Any) -> None:
    """Let each new scheduler of this class of vLLM's tell the control of its pool the name of the model.

    A second call changes nothing. vLLM gives its configuration to neither the pool nor the manager.
    """
    create = scheduler_class.__init__

    @wraps(create)
    def create_and_name(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        create(self, vllm_config, *args, **kwargs)
        control = getattr(self.kv_cache_manager.block_pool, "control", None)
        if control is not None:
            control.model_name = vllm_config.model_config.served_model_name

    scheduler_class.__init__ = create_and_name


def open_socket(pool: BlockPool, control: PoolControl) -> None:
    """Serve a pool until it is discarded or the process ends. A failure is logged; the engine continues."""
    given = find_value(CONTROL_PORT)
    try:
        port = NetworkPort.parse(given) if given else None
        if port is not None:
            port = replace(port, port=port.port + int(control.engine))
        server = ControlServer(
            control,
            find_socket(os.getpid()),
            why_no_node=_NOTHING_MOVES,
            tiers=control.get_tiers,
            port=port,
            web=port is not None,
        )
        server.start()
    except KVPoolError as error:
        own = "" if find_control() == "1" else f". With {CONTROL}=1 each engine process has its own"
        logger.warning("kv_pool could not open a control socket: %s%s", error, own)
        return
    weakref.finalize(pool, server.stop)
    also = "" if server.url is None else f"; page, metrics: {server.url}"
    logger.info("kv_pool answers at %s: kv-pool stats --socket %s%s", server.path, server.path, also)


def remove_sockets_at_exit(setting: str) -> None:
    """Remove the sockets of killed engine processes at the end of this process, which started them.

    `vllm serve` kills its engine processes by default. The end of Python waits for them before it calls this.
    """
    only = None if setting == "1" else Path(setting)
    Finalize(None, remove_dead_sockets, (only,), exitpriority=-1)  # negative: after the children have ended


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that holds `self.control.lock`, which the socket's answers take, during each call."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.control.lock:
            return method(self, *args, **kwargs)

    return call


_POOL_CHANGES = (
    *("get_new_blocks", "touch", "free_blocks", "cache_full_blocks", "cache_partial_block", "evict_blocks"),
    *("reset_prefix_cache", "take_events"),
)
"""The methods by which vLLM changes a pool."""

_MANAGER_CHANGES = (
    *("get_computed_blocks", "allocate_slots", "cache_blocks", "free", "pop_blocks_for_free"),
    *("remove_skipped_blocks", "take_kv_cache_block_copies", "evict_blocks", "reset_prefix_cache"),
    *("take_events", "record_prefix_cache_stats"),
)
"""The methods by which vLLM changes block tables, or the pool below a manager."""


def _lock_methods(cls: Any, names: Iterable[str]) -> Any:
    """Return the class, in which these methods are `_locked`."""
    for name in names:
        setattr(cls, name, _locked(getattr(cls, name)))
    return cls


@cache
def make_controlled(pool_class: type[BlockPool]) -> type[BlockPool]:
    """Return a subclass of a release's `BlockPool` that answers commands from a thread; always the same one.

    The commands are `kv-pool stats`, `layout` and `sequences --holds`. Each vLLM call that changes the pool
    takes a lock, so that answers are consistent.
    """

    class ControlledBlockPool(pool_class):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.control = PoolControl(self)
            super().__init__(*args, **kwargs)
            open_socket(self, self.control)

        def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
            super().touch(blocks)
            num_hits = sum([not block.is_null for block in blocks])
            self.control.note_lookup(num_hits, num_hits, is_seen_by_pool=True)

        def cache_full_blocks(
            self,
            request: Any,
            blocks: Sequence[KVCacheBlock],
            num_cached_blocks: int,
            num_full_blocks: int,
            block_size: int,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            super().cache_full_blocks(
                request, blocks, num_cached_blocks, num_full_blocks, block_size, *args, **kwargs
            )
            # Prompt blocks that were just computed were looked up and not hit.
            num_missed = min(num_full_blocks, request.num_prompt_tokens // block_size) - num_cached_blocks
            self.control.note_lookup(max(0, num_missed), 0, is_seen_by_pool=True)

        def take_events(self) -> list[KVCacheEvent]:
            events: list[KVCacheEvent] = super().take_events()
            self.control.taken_events.update(type(event).__name__ for event in events)
            return events

    return cast(type[BlockPool], _lock_methods(ControlledBlockPool, _POOL_CHANGES))


@cache
def make_controlled_manager(manager_class: Any) -> Any:
    """Return a subclass of a manager whose pool answers commands from a thread; always the same one.

    The answers of `kv-pool sequences` name the requests and their blocks. Each vLLM call that changes block
    tables or the pool takes the pool's lock, so that answers are consistent.
    """

    class ControlledKVCacheManager(manager_class):  # type: ignore[misc]
        pool_class = make_controlled(manager_class.pool_class)

        # `__new__` reads the options from the signature.
        @wraps(manager_class.__init__)  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.control = self.block_pool.control
            self.control.note_manager(self)

        def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
            super().record_prefix_cache_stats(request, num_hits)
            if not request.num_preemptions:  # vLLM's hit rate leaves out requests that return
                block_size = self.block_pool.hash_block_size
                self.control.note_lookup(request.num_tokens // block_size, num_hits // block_size)

    return _lock_methods(ControlledKVCacheManager, _MANAGER_CHANGES)
