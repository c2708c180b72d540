"""`TierWorker`: the worker half of the tiers of one rank."""

from __future__ import annotations

from kv_pool.ids import BlockId, RequestId
from kv_pool.integrations.vllm.connector.device_order import DeviceOrder
from kv_pool.integrations.vllm.connector.orders import StepOrders, WorkerReport
from kv_pool.integrations.vllm.connector.transfer_thread import TransferThread
from kv_pool.integrations.vllm.connector.worker_tiers import WorkerTiers
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier


class TierWorker:
    """Executes the orders of each step in the background, and collects the results.

    Args:
        storage: the bytes of the GPU blocks.
        host_blocks: capacity of the host tier.
        disk: the disk tier, or None.

    Attributes:
        failed_blocks: blocks that finished loads could not load; the engine takes them.
        failed_requests: the requests of these loads.
    """

    def __init__(self, storage: BlockStorage, host_blocks: int, disk: DiskTier | None) -> None:
        self.storage = storage
        self.failed_blocks: set[BlockId] = set()
        self.failed_requests: set[RequestId] = set()
        reopened = None if disk is None else disk.list_keys()
        self.transfers = TransferThread(
            WorkerTiers(storage, HostTier(host_blocks, storage), disk),
            DeviceOrder(storage.device),
            WorkerReport(reopened=reopened),
        )

    def start_loads(self, orders: StepOrders) -> None:
        """Start a step's loads."""
        if orders.loads:
            self.transfers.load(orders.loads)

    def start_stores(self, orders: StepOrders) -> None:
        """Start a step's removals and stores; call it after the work that writes the step's blocks."""
        if orders.clears:
            self.transfers.clear()
        if orders.forgotten:
            self.transfers.remove(orders.forgotten)
        if orders.stores:
            self.transfers.store(orders.stores)

    def take_loaded(self) -> set[RequestId]:
        """Return the requests whose loads have ended, also those in `failed_requests`."""
        ended: set[RequestId] = set()
        for request_id, failed in self.transfers.take_loaded():
            ended.add(request_id)
            if failed:
                self.failed_blocks.update(failed)
                self.failed_requests.add(request_id)
        return ended

    def take_failed_blocks(self) -> set[BlockId]:
        """Return the blocks that were not loaded since the last call."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[RequestId]:
        """Return the requests of loads that failed since the last call."""
        failed, self.failed_requests = self.failed_requests, set()
        return failed

    def close(self) -> None:
        """Finish the current copy, drop the waiting ones, and close the tiers."""
        self.transfers.close()
