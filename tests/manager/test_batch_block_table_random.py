"""Random batches: rows and slots are compared with a slow model of lists after every step."""

import random

import numpy as np
import pytest
from manager.table_makers import append, drop_head, ids, make_table, replace

from kv_pool import BlockHasher, KVCacheManager, Request
from kv_pool.contiguous.compaction import pack
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.manager.batch_block_table import BatchBlockTable
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.manager.slot_mapping import SlotMapping

NUM_ROWS, NUM_COLUMNS, NUM_BLOCKS, NUM_STEPS = 6, 12, 200, 60


class Life:
    """One batch, its tables, and the expected rows: row i belongs to `order[i]`."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.block_size = self.rng.choice([1, 3, 4, 16])
        self.one_edit = self.rng.random() < 0.5  # whether a window's move counts as one edit, or by entries
        dtype = self.rng.choice([np.int32, np.int64])
        self.batch = BatchBlockTable(NUM_ROWS, NUM_COLUMNS, self.block_size, dtype=dtype)
        self.mapping = SlotMapping(self.batch, NUM_ROWS * NUM_COLUMNS * self.block_size)
        self.tables = {}
        self.order = []
        self.num_requests_ever = 0

    def some_ids(self, most):
        return self.rng.sample(range(1, NUM_BLOCKS), self.rng.randint(0, most))

    def come(self):
        if len(self.order) == NUM_ROWS:
            return
        name = f"r{self.num_requests_ever}"
        self.num_requests_ever += 1
        num_null = self.rng.choice([0, 0, 0, 1, 3])
        table = make_table(*[0] * num_null, *self.some_ids(NUM_COLUMNS - num_null))
        table.num_edits = self.rng.choice([0, 0, 1, 5])
        self.tables[name] = table
        self.order.append(name)
        assert self.batch.add_request(name, table) == len(self.order) - 1

    def leave(self):
        if self.order:
            name = self.rng.choice(self.order)
            row = self.order.index(name)
            assert self.batch.remove_request(name) == row
            self.order[row] = self.order[-1]
            self.order.pop()
            del self.tables[name]

    def swap(self):
        if self.order:
            a, b = (self.rng.randrange(len(self.order)) for _ in range(2))
            self.batch.swap_rows(a, b)
            self.order[a], self.order[b] = self.order[b], self.order[a]

    def grow(self):
        for table in self.tables.values():
            if self.rng.random() < 0.6:
                append(table, *self.some_ids(min(3, NUM_COLUMNS - len(table.blocks))))

    def move_windows(self):
        for table in self.tables.values():
            room = len(table.blocks) - table.num_null_blocks
            if room and self.rng.random() < 0.6:
                far = self.rng.choice([1, 1, self.rng.randint(1, room)])
                drop_head(table, table.num_null_blocks + far, self.one_edit)

    def edit(self):
        for table in self.tables.values():
            if table.blocks and self.rng.random() < 0.4:
                replace(table, self.rng.randrange(len(table.blocks)), self.rng.randrange(1, NUM_BLOCKS))

    def cut(self):
        for table in self.tables.values():
            if self.rng.random() < 0.2:
                del table.blocks[self.rng.randint(0, len(table.blocks)) :]
                table.num_null_blocks = min(table.num_null_blocks, len(table.blocks))
                table.num_edits += 1

    def compact(self):
        """Move blocks to other ids; tables may have grown since the last update."""
        chosen = self.rng.sample(range(1, NUM_BLOCKS), 40)
        moved = dict(zip(chosen[:20], chosen[20:], strict=True))
        exchanged = moved | {target: source for source, target in moved.items()}
        for block in {block for table in self.tables.values() for block in table.blocks}:
            block.block_id = exchanged.get(block.block_id, block.block_id)
        self.batch.rewrite()

    def check(self):
        batch = self.batch
        before = batch.block_ids.copy()
        changed = batch.update()
        expected = [ids(self.tables[name]) for name in self.order]
        padded = [row + [0] * (NUM_COLUMNS - len(row)) for row in expected]
        padded += [[0] * NUM_COLUMNS] * (NUM_ROWS - len(padded))
        assert batch.block_ids.tolist() == padded
        assert batch.list_request_ids() == self.order
        assert {int(row) for row in (before != batch.block_ids).any(axis=1).nonzero()[0]} <= set(changed)
        self.check_decode(expected)
        self.check_chunks(expected)

    def check_decode(self, tables):
        places = [self.some_place(table) for table in tables]
        num_tokens = next((at for at, place in enumerate(places) if place is None), len(places))
        positions = np.array(places[:num_tokens], np.int64)
        num_slots = num_tokens + self.rng.randint(0, 3)
        found = self.mapping.fill_decode(positions, num_slots=num_slots)
        slow = [self.slot(table, place) for table, place in zip(tables, places[:num_tokens], strict=False)]
        assert found.tolist() == slow + [-1] * (num_slots - num_tokens)

    def check_chunks(self, tables):
        starts, firsts, slow = [0], [], []
        for table in tables:
            first = self.some_place(table)
            end = len(table) * self.block_size
            if first is None:
                first = end = self.rng.randint(0, 5)
            # Up to the end, or to a later null block.
            positions = list(range(first, self.rng.randint(first, end)))
            positions = positions[
                : next((i for i, p in enumerate(positions) if not table[p // self.block_size]), None)
            ]
            firsts.append(first)
            starts.append(starts[-1] + len(positions))
            slow += [self.slot(table, position) for position in positions]
        dtype = self.rng.choice([np.int32, np.int64])
        found = self.mapping.fill_chunks(np.array(starts, dtype), np.array(firsts, dtype))
        assert found.tolist() == slow

    def some_place(self, table):
        held = [column for column, block_id in enumerate(table) if block_id]
        if not held:
            return None
        return self.rng.choice(held) * self.block_size + self.rng.randrange(self.block_size)

    def slot(self, table, position):
        return table[position // self.block_size] * self.block_size + position % self.block_size


@pytest.mark.parametrize("seed", range(150))
def test_rows_and_slots_agree_with_a_slow_model(seed):
    life = Life(seed)
    steps = [life.come, life.come, life.leave, life.swap, life.grow, life.grow, life.move_windows, life.edit]
    steps += [life.cut, life.compact]
    for _ in range(NUM_STEPS):
        for _ in range(life.rng.randint(1, 3)):
            life.rng.choice(steps)()
        life.check()


@pytest.mark.parametrize("seed", range(30))
def test_rows_follow_tables_through_forks_frees_and_compaction(seed):
    rng = random.Random(seed)
    pool = RunBlockPool(80, True, 4)
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=7)]
    manager = KVCacheManager(pool, groups=groups)
    batches = [BatchBlockTable(6, 16, 4) for _ in groups]
    hasher = BlockHasher(block_size=4, seed="seed")
    requests = {}

    def come(request):
        requests[request.request_id] = request
        for group_id, batch in enumerate(batches):
            batch.add_request(request.request_id, manager.get_table(request.request_id, group_id))

    def leave(request):
        manager.free(request)
        del requests[request.request_id]
        assert len({batch.remove_request(request.request_id) for batch in batches}) == 1

    def start(request):
        prefix = manager.get_computed_blocks(request)
        num_new = rng.randint(1, request.num_tokens - prefix.num_tokens)  # a chunk of the rest
        if manager.allocate_slots(request, num_new, prefix) is not None:
            request.num_computed_tokens = prefix.num_tokens + num_new
            come(request)

    for step in range(60):
        if len(requests) < 6 and rng.random() < 0.4:
            start(Request(f"r{step}", [7] * rng.randint(1, 24), hasher))
        if 0 < len(requests) < 6 and rng.random() < 0.2:
            parent = rng.choice(list(requests.values()))
            child = Request(f"r{step}c", parent.all_token_ids, hasher)
            child.num_computed_tokens = parent.num_computed_tokens
            manager.fork(parent, child)
            come(child)
        if requests and rng.random() < 0.15:
            leave(rng.choice(list(requests.values())))
        for request in list(requests.values()):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([rng.randrange(3)])
            num_new = rng.randint(1, request.num_tokens - request.num_computed_tokens)
            if request.num_tokens > 60 or manager.allocate_slots(request, num_new) is None:
                leave(request)
            else:
                request.num_computed_tokens += num_new
        manager.take_block_copies()
        for batch in batches:
            batch.update()
        if rng.random() < 0.1:
            pack(pool, lambda moves: None)
            for batch in batches:
                batch.rewrite()
        for group_id, batch in enumerate(batches):
            held = [manager.get_block_ids(name, group_id) for name in batch.list_request_ids()]
            assert batch.get_rows().tolist() == [row + [0] * (16 - len(row)) for row in held]
            assert not batch.block_ids[batch.num_requests :].any()
