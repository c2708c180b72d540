"""`KVPoolConnector`: vLLM's interface to the two halves of the tiers, and to the options of clients.

Loaded by vLLM through `kv_connector_module_path`; see the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.ids import BlockHashWithGroupId, BlockId
from kv_pool.integrations.vllm.connector.engine_config import (
    count_block_bytes,
    describe_blocks,
    describe_bytes,
    describe_groups,
    open_disk_tier,
    wrap_caches,
)
from kv_pool.integrations.vllm.connector.settings import ConnectorSettings, count_blocks
from kv_pool.integrations.vllm.connector.tier_index import StepOrders, TierIndex, WorkerReport
from kv_pool.integrations.vllm.connector.tier_scheduler import COUNTS, TierScheduler
from kv_pool.integrations.vllm.connector.tier_worker import TierWorker
from kv_pool.integrations.vllm.request_options.handler import note_arrival, report_end
from kv_pool.integrations.vllm_warnings import warn_if_unused
from kv_pool.loggers import get_logger
from kv_pool.tiers.tier_prefixes import GroupKeys

logger = get_logger(__name__)


@dataclass
class KVPoolMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step, sent to all workers."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class KVPoolReport(KVConnectorWorkerMetadata, KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The report of a worker, or of several, sent to the scheduler: at the start, and after each step."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVPoolReport)
        return KVPoolReport(self.report.merge(other.report))


class ConnectorStatistics(KVConnectorStats):  # type: ignore[misc]
    """The numbers that vLLM logs, in `data`: counts since the last log, and what is in the tiers now."""

    @classmethod
    def take_from(cls, scheduler: TierScheduler) -> ConnectorStatistics:
        """Return the counts since the last call, and the present content."""
        index = scheduler.index
        levels = {
            "host blocks": len(index.host),
            "disk blocks": 0 if index.disk is None else len(index.disk),
            "waiting stores": index.num_arriving,
        }
        return cls(data={**dict.fromkeys(COUNTS, 0), **scheduler.take_counts(), **levels})

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of a later interval; its content replaces this one's."""
        for name in COUNTS:
            self.data[name] = self.data.get(name, 0) + other.data.get(name, 0)
        self.data.update((name, other.data[name]) for name in other.data if name not in COUNTS)
        return self

    def reduce(self) -> dict[str, Any]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.get(name) for name in COUNTS)


_UNKNOWN: dict[str, Any] = dict.fromkeys(("parent_block_hash", "lora_id", "lora_name"))
_UNKNOWN |= {"token_ids": (), "block_size": 0}


class TierEventLog:
    """Collects a BlockStored or BlockRemoved for each block that enters or leaves a tier.

    A block that was found on disk at the start is published with its hash only: no tokens, and a
    `block_size` of 0.

    Args:
        kv_cache_config: the engine's configuration, for the kinds of its groups.
        index: what the tiers hold.
    """

    def __init__(self, kv_cache_config: Any, index: TierIndex) -> None:
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._index = index
        self._num_to_sweep_at = 2 * sum(tier.capacity for tier in index.tiers)
        self._events: list[Any] = []
        # The events' fields about the block's content.
        self._labels: dict[BlockHashWithGroupId, dict[str, Any]] = {}

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def on_planned(self, request: Any, group: GroupKeys, position: int, key: BlockHashWithGroupId) -> None:
        """Note the content of a block whose store is planned; `position` is that in the block table."""
        if len(self._labels) > self._num_to_sweep_at:
            self._labels = {key: label for key, label in self._labels.items() if self._index.knows(key)}
        start = position * group.block_size
        end = start + group.block_size
        parent = group.list_keys(request, position - 1, position)[0] if position else None
        adapter = request.lora_request
        extra_keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
        self._labels[key] = {
            "parent_block_hash": None if parent is None else maybe_convert_block_hash(get_block_hash(parent)),
            "token_ids": tuple(request.all_token_ids[start:end]),
            "block_size": group.block_size,
            "lora_id": None if adapter is None else adapter.adapter_id,
            "lora_name": None if adapter is None else adapter.name,
            "extra_keys": to_event_extra_keys(extra_keys and [extra_keys]),
        }

    def announce_stored(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """See `TierListener`."""
        for key in keys:
            group_id = get_group_id(key)
            spec = self._specs[group_id]
            label = self._labels.get(key, _UNKNOWN)
            # Each event has a list of tokens of its own: a reader may change it.
            own = {**label, "token_ids": list(label["token_ids"])}
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    medium=medium,
                    group_idx=group_id,
                    kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                    kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                    **own,
                )
            )

    def announce_removed(self, medium: str, keys: Sequence[BlockHashWithGroupId]) -> None:
        """See `TierListener`."""
        for key in keys:
            self._events.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    medium=medium,
                    group_idx=get_group_id(key),
                )
            )


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Host and disk tiers for an engine of vLLM, and the options of its requests.

    vLLM creates one in the scheduler and one in each worker. Without `host_bytes` there are no tiers, and the
    connector only applies the options and returns their reports to the clients.

    Attributes:
        settings: the settings of `kv_connector_extra_config`.
        scheduler: the scheduler half; None in workers and without tiers.
        worker: the worker half; None in the scheduler, without tiers, and before the KV caches exist.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = ConnectorSettings.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        self.scheduler: TierScheduler | None = None
        self.worker: TierWorker | None = None
        self._event_log: TierEventLog | None = None
        self._manager: Any = None  # of the engine; only in the scheduler
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        has_tiers = self.settings.host_bytes > 0
        if has_tiers:
            self._groups, self._alignment = describe_groups(vllm_config, kv_cache_config)
            # The capacity of a rank's tiers, in blocks.
            self._block_bytes = count_block_bytes(kv_cache_config)
            sizes = vllm_config.parallel_config.world_size, self._block_bytes
            self._host_blocks = count_blocks("host_bytes", self.settings.host_bytes, *sizes)
            self._disk_blocks = count_blocks("disk_bytes", self.settings.disk_bytes, *sizes)
        if role is KVConnectorRole.SCHEDULER:
            warn_if_unused()
            if has_tiers:
                self.scheduler = self._make_scheduler()

    # ---- what vLLM asks before it starts -------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not stored is only computed again."""
        return False

    # ---- start: the workers' reports, for the scheduler ----------------------------------------------

    def get_handshake_metadata(self) -> KVPoolReport | None:
        """Return the report of this worker, so that the first request finds what is on disk.

        None inside vLLM's MultiConnector, which hands the metadata of only one of its connectors to all of
        them: the report then follows the first step.
        """
        is_alone = has_kv_transfer_group() and get_kv_transfer_group() is self
        return self.build_connector_worker_meta() if is_alone else None

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Apply the reports of all workers."""
        reports = [one.report for one in metadata.values() if isinstance(one, KVPoolReport)]
        if self.scheduler is not None and reports:
            self.scheduler.apply_report(reduce(WorkerReport.merge, reports))

    # ---- scheduler: requests ---------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager
        if self.scheduler is not None:
            pool = kv_cache_manager.block_pool
            self.scheduler.bind(pool, kv_cache_manager.get_block_ids)
            control = getattr(pool, "control", None)
            if control is not None:
                control.note_tiers(self.scheduler)

    def on_new_request(self, request: Any) -> None:
        note_arrival(self._manager, request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler is None or request.skip_reading_prefix_cache:
            return 0, False
        num_tokens = self.scheduler.find_hit(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self.scheduler is not None:
            self.scheduler.plan_load(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        if self.scheduler is None or not num_external_tokens:
            return {}
        num_host, num_disk = self.scheduler.count_hit_tokens(request)
        found = {CacheHitSource.HOST: num_host, CacheHitSource.DISK: num_disk}
        return {source: num_tokens for source, num_tokens in found.items() if num_tokens}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[BlockId], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store the request's last blocks, which are held until they are read; so they can be freed now."""
        if self.scheduler is not None:
            self.scheduler.finish_request(request, block_ids)
        return False, report_end(self._manager, request)

    def request_finished(self, request: Any, block_ids: list[BlockId]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    # ---- scheduler: steps ------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self.scheduler is None:
            return KVPoolMetadata()
        return KVPoolMetadata(self.scheduler.take_orders(scheduler_output.num_scheduled_tokens))

    def update_connector_output(self, connector_output: Any) -> None:
        if self.scheduler is None:
            return
        # Losses first: a request whose load failed must not find the same blocks again.
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVPoolReport):
            self.scheduler.apply_report(metadata.report)
        self.scheduler.end_loads(connector_output.finished_recving or ())

    def has_pending_block_frees(self) -> bool:
        return self.scheduler is not None and self.scheduler.holds_freed_blocks()

    def has_pending_push_work(self) -> bool:
        return self.scheduler is not None and self.scheduler.has_work()

    def take_events(self) -> Iterable[Any]:
        return () if self._event_log is None else self._event_log.take_events()

    def reset_cache(self) -> bool | None:
        return None if self.scheduler is None else self.scheduler.reset()

    def get_kv_connector_stats(self) -> ConnectorStatistics | None:
        return None if self.scheduler is None else ConnectorStatistics.take_from(self.scheduler)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStatistics:
        return ConnectorStatistics(data=data or {})

    # ---- worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Allocate the host tier and open the disk tier of this rank; raises what `DiskTier` raises."""
        if not self.settings.host_bytes or self._role is not KVConnectorRole.WORKER:
            return
        parallel = self._vllm_config.parallel_config
        block_format = (
            f"{self._vllm_config.cache_config.cache_dtype} {describe_bytes(self._kv_cache_config)}, "
            f"rank {parallel.rank} of {parallel.world_size}"
        )
        storage = wrap_caches(kv_caches, self._kv_cache_config, block_format)
        disk = None
        if self._disk_blocks:
            layout = describe_blocks(self._vllm_config, storage, self._alignment, self.settings.weights)
            disk = open_disk_tier(self.settings.disk_folder, self._disk_blocks, layout, parallel)
        self.worker = TierWorker(storage, self._host_blocks, disk)
        logger.info(
            "kv_pool stores blocks of %d bytes in host memory, %d at most%s",
            storage.block_bytes,
            self._host_blocks,
            f", and on disk, {self._disk_blocks} at most" if self._disk_blocks else "",
        )

    def unregister_kv_caches(self) -> None:
        """Wait for all copies, before the memory of the KV caches is released for a while."""
        if self.worker is not None:
            self.worker.wait()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.worker is not None:
            self.worker.start_loads(self._get_orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is scheduled after its blocks are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to save: blocks are stored whole, after the step that computed them."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.start_stores(self._get_orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.worker is None:
            return None, None
        return None, set(self.worker.take_loaded()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        # With several groups, vLLM cannot find the request of a block id.
        if self.worker is not None and self._num_groups > 1:
            results.failed_recving = set(self.worker.take_failed())
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        if self.worker is None or self._num_groups > 1:
            return set()
        return {block_id for block_ids in self.worker.take_failed().values() for block_id in block_ids}

    def build_connector_worker_meta(self) -> KVPoolReport | None:
        report = None if self.worker is None else self.worker.take_report()
        return None if report is None else KVPoolReport(report)

    def shutdown(self) -> None:
        """Finish the current copy and close the tiers. No-op on a second call."""
        if self.worker is not None:
            self.worker.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _get_orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVPoolMetadata)
        return metadata.orders

    def _make_scheduler(self) -> TierScheduler:
        config = self._vllm_config
        index = TierIndex(self._host_blocks, self._disk_blocks, self._block_bytes)
        events = config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._event_log = TierEventLog(self._kv_cache_config, index)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r: a request fails if one of its blocks cannot be read from a "
                "tier. Set it to 'recompute' in --kv-transfer-config to compute such blocks instead",
                self._kv_transfer_config.kv_load_failure_policy,
            )
        speculative = config.speculative_config
        scheduler = TierScheduler(
            index,
            self._groups,
            self._alignment,
            num_ranks=config.parallel_config.world_size,
            drops_last_block=speculative is not None and speculative.use_eagle_block_drop(),
            lease_s=self.settings.lease_s,
            listener=self._event_log,
        )
        logger.info(
            "kv_pool keeps up to %d blocks in host memory and %d on disk, per rank of %d",
            self._host_blocks,
            self._disk_blocks,
            config.parallel_config.world_size,
        )
        return scheduler
