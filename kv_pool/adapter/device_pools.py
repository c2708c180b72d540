"""`DevicePools`: several pools behind one `KVPoolProtocol`, with common ids from 0."""

from collections.abc import Sequence
from dataclasses import replace

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.core.arguments import as_int, as_ints, as_list_of
from kv_pool.errors import InvalidArgumentError, InvalidBlockError, PoolExhaustedError, UnknownDeviceError
from kv_pool.ids import BlockId
from kv_pool.protocol import BlockAllocationRequest, BlockInfo, KVPoolProtocol


class DevicePools(KVPoolProtocol):
    """The pools of several devices under one range of ids; each request may name its device.

        >>> from kv_pool import BlockAllocationRequest, GPUKVPool
        >>> from kv_pool.adapter.device_pools import DevicePools
        >>> pools = DevicePools([GPUKVPool(100, 16), GPUKVPool(50, 16, device_id=1)])
        >>> ids = pools.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=7, device_id=1))
        >>> [100 <= block_id < 150 for block_id in ids]
        [True, True]
        >>> pools.get_block_info(ids[0]).device_id, pools.get_free_blocks()
        (1, 148)

    Ids run from 0 to the number of all blocks less 1, the first pool's ids first. Block `n` of a pool has the
    id `first + n - 1` here (`to_ids`), since block 0 of a pool is its null block. Use `pools[device_id]` for
    methods that are missing here. Thread-safe, like the pools.

    Args:
        pools: one per device; the constructor connects them to each other. Do not resize them: `grow` and
            `shrink` would shift the ids.
    Raises:
        InvalidArgumentError: there is no pool, two have the same device id, or their block sizes differ.

    Attributes:
        pools: the pools by device id.
    """

    def __init__(self, pools: Sequence[GPUKVPool]) -> None:
        listed = as_list_of("pools", pools, GPUKVPool)
        if not listed:
            raise InvalidArgumentError("pools is empty; give one pool for each device")
        for position, pool in enumerate(listed):
            for other in listed[:position]:
                pool.connect(other)
        self.pools: dict[int, GPUKVPool] = {pool.device_id: pool for pool in listed}
        self._firsts: dict[int, int] = {}
        total_blocks = 0
        for pool in listed:
            self._firsts[pool.device_id] = total_blocks
            total_blocks += pool.total_blocks
        self.total_blocks = total_blocks

    def to_ids(self, device_id: int, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Convert block ids of one pool to common ids.

        Raises:
            UnknownDeviceError: there is no such pool.
        """
        before = self._firsts[self._find(device_id).device_id] - 1
        return [BlockId(before + block_id) for block_id in block_ids]

    def allocate(self, request: BlockAllocationRequest) -> list[BlockId]:
        """Like `GPUKVPool.allocate` on the request's device; None tries the pools, most free blocks first.

        Raises:
            As `GPUKVPool.allocate`; with device None, the error of the last pool tried.
        """
        if request.device_id is not None:
            device_id = self._find(request.device_id).device_id
            return self.to_ids(device_id, self.pools[device_id].allocate(request))
        by_room = sorted(self.pools.values(), key=lambda pool: -pool.count_available(request.priority))
        for pool in by_room[:-1]:
            try:
                return self.to_ids(pool.device_id, pool.allocate(request))
            except PoolExhaustedError:
                continue
        return self.to_ids(by_room[-1].device_id, by_room[-1].allocate(request))

    def free(self, block_ids: Sequence[BlockId]) -> None:
        """Like `GPUKVPool.free`, on each device in turn.

        Raises:
            As `GPUKVPool.free`: nothing has changed on that device; blocks on earlier devices are released.
        """
        for device_id, own_ids in self._group(block_ids).items():
            self.pools[device_id].free(own_ids)

    def get_block_info(self, block_id: BlockId) -> BlockInfo:
        """Return a description of a block, free or in use, under its common id."""
        device_id, own_id = self._split(BlockId(as_int("block_id", block_id)))
        return replace(self.pools[device_id].get_block_info(own_id), block_id=block_id)

    def defragment(self) -> int:
        """Defragment each pool, like `GPUKVPool.defragment`. Return how many blocks changed their id."""
        return sum(pool.defragment() for pool in self.pools.values())

    def migrate_blocks(self, block_ids: Sequence[BlockId], target_device_id: int) -> list[BlockId]:
        """Like `GPUKVPool.migrate_blocks`; all blocks must be on one device.

        Raises:
            InvalidArgumentError: the blocks are on several devices, or already on the target. Nothing has
                changed.
        """
        target = self._find(target_device_id).device_id
        by_device = self._group(block_ids)
        if not by_device:
            return []
        if len(by_device) > 1 or target in by_device:
            raise InvalidArgumentError(
                f"the blocks are on devices {sorted(by_device)}; migrate those of one device at a time to "
                "another one"
            )
        [(device_id, own_ids)] = by_device.items()
        return self.to_ids(target, self.pools[device_id].migrate_blocks(own_ids, target))

    def get_free_blocks(self) -> int:
        """Return how many blocks are free on all devices together."""
        return sum(pool.get_free_blocks() for pool in self.pools.values())

    def get_fragmentation_rate(self) -> float:
        """Return the mean of the pools' rates, weighted by their free blocks; 0.0 if no block is free."""
        free = {pool: pool.get_free_blocks() for pool in self.pools.values()}
        num_free = sum(free.values())
        return (
            sum(pool.get_fragmentation_rate() * count for pool, count in free.items()) / num_free
            if num_free
            else 0.0
        )

    def _find(self, device_id: int) -> GPUKVPool:
        pool = self.pools.get(as_int("device_id", device_id))
        if pool is None:
            raise UnknownDeviceError(f"there is no device {device_id}; there are {sorted(self.pools)}")
        return pool

    def _group(self, block_ids: Sequence[BlockId]) -> dict[int, list[BlockId]]:
        """Return the ids of blocks in the pools of their devices, by device."""
        by_device: dict[int, list[BlockId]] = {}
        for block_id in map(BlockId, as_ints("block_ids", block_ids)):
            device_id, own_id = self._split(block_id)
            by_device.setdefault(device_id, []).append(own_id)
        return by_device

    def _split(self, block_id: BlockId) -> tuple[int, BlockId]:
        """Return the device of a block and its id in that device's pool."""
        if 0 <= block_id < self.total_blocks:
            for device_id, first in reversed(self._firsts.items()):
                if block_id >= first:
                    return device_id, BlockId(block_id - first + 1)
        raise InvalidBlockError(f"block {block_id} is not one of 0 to {self.total_blocks - 1}")
