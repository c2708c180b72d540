"""A `TierScheduler` and `TierWorker`s over a pool of kv_pool, without vLLM."""

import zlib
from functools import partial
from types import SimpleNamespace

import numpy as np

from kv_pool import BlockPool
from kv_pool.core.block_keys import group_suffix
from kv_pool.integrations.vllm.connector.tier_index import TierIndex
from kv_pool.integrations.vllm.connector.tier_scheduler import TierScheduler
from kv_pool.integrations.vllm.connector.tier_worker import TierWorker
from kv_pool.storage import BlockLayout, BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.tier_prefixes import GroupKeys

BLOCK_SIZE = 4
TIMEOUT_S = 60


def make_content(key, rank):
    """Return the bytes of the block with this key, (32,) uint8."""
    first = zlib.crc32(key, rank)
    return np.frombuffer(b"".join((first * (n + 1) % 2**32).to_bytes(4, "big") for n in range(8)), np.uint8)


def skip_window(window, num_tokens):
    return max(0, num_tokens - window + 1)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Halves:
    """Both halves, and a pool whose blocks hold `make_content` of their keys.

    Args:
        windows: the window of each group; None for full attention.
    """

    def __init__(
        self,
        folder,
        windows=(None,),
        *,
        num_blocks=30,
        host=10,
        disk=20,
        num_ranks=1,
        lease_s=300,
        alignment=4,
    ):
        self.clock = Clock()
        self.pool = BlockPool(num_blocks, True, BLOCK_SIZE)
        self.pool.holds.clock = self.clock
        self.groups = [
            GroupKeys(number, BLOCK_SIZE, 1, window and partial(skip_window, window))
            for number, window in enumerate(windows)
        ]
        self.index = TierIndex(host, disk, 32)
        self.scheduler = TierScheduler(
            self.index, self.groups, alignment, num_ranks=num_ranks, lease_s=lease_s
        )
        self.tables = {}
        self.scheduler.bind(self.pool, lambda name: self.tables[name])
        self.memory = [np.zeros((num_blocks, 32), np.uint8) for _ in range(num_ranks)]
        self.workers = []
        for rank, memory in enumerate(self.memory):
            storage = BlockStorage.wrap_state([memory])
            layout = BlockLayout.describe(storage, BLOCK_SIZE, model=f"rank {rank}")
            tier = DiskTier(folder / f"rank{rank}", disk, layout) if disk else None
            self.workers.append(TierWorker(storage, host, tier))
        self.failed = {}

    def close(self):
        for worker in self.workers:
            worker.close()

    # ---- requests --------------------------------------------------------------------------------

    def make_request(self, name, hashes):
        """Return a request; its hashes are given, and one more token follows."""
        return SimpleNamespace(
            request_id=name,
            block_hashes=list(hashes),
            num_tokens=len(hashes) * BLOCK_SIZE + 1,
            num_computed_tokens=0,
            num_in_flight_tokens=0,
            all_token_ids=list(range(len(hashes) * BLOCK_SIZE + 1)),
            lora_request=None,
        )

    def admit(self, request):
        """Allocate all blocks of a request and order its load; return its tokens from tiers, None if full."""
        num_hit = self.scheduler.find_hit(request, 0)
        num_blocks = len(request.block_hashes) + 1
        if self.pool.get_num_free_blocks() < num_blocks * len(self.groups):
            return None
        tables = [[block.block_id for block in self.pool.get_new_blocks(num_blocks)] for _ in self.groups]
        for group, table in zip(self.groups, tables, strict=True):
            first = group.list_needed(0, num_hit).start
            self.pool.free_blocks(self.pool.blocks[block_id] for block_id in table[:first])
            table[:first] = [self.pool.null_block.block_id] * first
        self.tables[request.request_id] = tables
        self.scheduler.plan_load(request, tables, num_hit)
        request.num_computed_tokens = num_hit
        return num_hit

    def compute(self, request, num_blocks):
        """Write and cache the blocks of a request up to `num_blocks`."""
        start = request.num_computed_tokens // BLOCK_SIZE
        for group, table in zip(self.groups, self.tables[request.request_id], strict=True):
            keys = group.list_keys(request, start, num_blocks)
            for key, block_id in zip(keys, table[start:num_blocks], strict=True):
                for rank, memory in enumerate(self.memory):
                    memory[block_id] = make_content(key, rank)
            blocks = [self.pool.blocks[block_id] for block_id in table]
            self.pool.cache_full_blocks(request, blocks, start, num_blocks, BLOCK_SIZE, group.group_id)
        request.num_computed_tokens = num_blocks * BLOCK_SIZE

    def cache_loaded(self, request):
        """Cache the blocks that a request has loaded, after checking their bytes."""
        num_blocks = request.num_computed_tokens // BLOCK_SIZE
        for group, table in zip(self.groups, self.tables[request.request_id], strict=True):
            first = group.list_needed(0, num_blocks * BLOCK_SIZE).start
            for key, block_id in zip(
                group.list_keys(request, first, num_blocks), table[first:num_blocks], strict=True
            ):
                assert key.endswith(group_suffix(group.group_id))
                for rank, memory in enumerate(self.memory):
                    assert bytes(memory[block_id]) == bytes(make_content(key, rank)), (
                        f"{request.request_id}: block {block_id} of {key!r}"
                    )
            blocks = [self.pool.blocks[block_id] for block_id in table]
            self.pool.cache_full_blocks(request, blocks, first, num_blocks, BLOCK_SIZE, group.group_id)

    def finish(self, request):
        """End a request and free its blocks; the content of free blocks is overwritten on reuse only."""
        tables = self.tables.pop(request.request_id)
        self.scheduler.finish_request(request, tables)
        for table in tables:
            blocks = [self.pool.blocks[block_id] for block_id in table]
            self.pool.free_blocks(block for block in reversed(blocks) if not block.is_null)

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, names=(), waits=True):
        """Run a step. Return the requests whose loads have ended on all ranks -> whether one failed."""
        self.send(names)
        return self.collect(waits)

    def send(self, names=()):
        orders = self.scheduler.take_orders(names)
        for worker in self.workers:
            worker.start_loads(orders)
            worker.start_stores(orders)

    def collect(self, waits=True):
        report = None
        for worker in self.workers:
            if waits:
                assert worker.wait(TIMEOUT_S)
            for name in worker.take_loaded():
                self.failed.setdefault(name, []).append(False)
            for name in worker.take_failed():
                self.failed[name][-1] = True
            reported = worker.take_report()
            if reported is not None:
                report = reported if report is None else report.merge(reported)
        if report is not None:
            self.scheduler.apply_report(report)
        ended = {name: any(told) for name, told in self.failed.items() if len(told) == len(self.workers)}
        for name in ended:
            del self.failed[name]
        self.scheduler.end_loads(ended)
        return ended

    def drain(self):
        """Step until nothing is left to do."""
        ended = {}
        for _ in range(100):
            ended.update(self.step())
            if not self.scheduler.has_work():
                return ended
        raise AssertionError("stores do not end")
