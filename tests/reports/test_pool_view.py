"""Views: the map, the largest sequences, the shared prefixes, and for how long the lock is held."""

import time

import pytest
from adapter.made_pool import make, take

from kv_pool import BlockPool, GPUKVPool, KVCacheManager, Request
from kv_pool.control import ControlledManager
from kv_pool.core.block_hash import BlockHasher
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.reports.pool_reading import PoolSources
from kv_pool.reports.pool_view import HotPrefix, MapCell, read_view


def view(pool, **options):
    return read_view(PoolSources(pool=pool), **options)


def share(pool, sequence_id, hashes, num_new=0):
    """Let a sequence hit these blocks and compute those that are missing, and `num_new` blocks of its own."""
    hits = pool.claim_prefix(sequence_id, hashes)
    num_missing = len(hashes) - len(hits) + num_new
    if num_missing:
        take(pool, sequence_id, num_missing)
        pool.cache_prefix(sequence_id, hashes)


def test_a_cell_counts_its_blocks_by_state():
    pool = make(10)
    take(pool, 1, 3)
    share(pool, 2, [b"a", b"b", b"c", b"d"])
    pool.free_sequence(2)
    pool.pin([2])
    shown = view(pool, num_cells=4).map
    assert (shown.num_blocks, shown.blocks_per_cell) == (10, 3)
    assert shown.cells == [
        MapCell(empty=0, cached=0, in_use=2, immovable=1),
        MapCell(empty=0, cached=3, in_use=0, immovable=0),
        MapCell(empty=2, cached=1, in_use=0, immovable=0),
        MapCell(empty=1, cached=0, in_use=0, immovable=0),
    ]


@pytest.mark.parametrize("has_runs", [True, False])
def test_a_cell_of_many_blocks_has_the_shares_of_all_its_blocks(has_runs):
    if has_runs:
        gpu_pool = GPUKVPool(30_000, 4)
        for number in range(1500):
            take(gpu_pool, number, 16 - 8 * (number % 2))
        pool = gpu_pool.block_pool
    else:
        pool = BlockPool(30_001, True, 4)
        blocks = pool.get_new_blocks(20_000)
        pool.free_blocks(blocks[::3])
    shown = view(pool, num_cells=20).map
    assert (len(shown.cells), shown.blocks_per_cell) == (20, 1500)
    for number, cell in enumerate(shown.cells):
        blocks = pool.blocks[1 + 1500 * number : 1501 + 1500 * number]
        in_use = sum(block.ref_cnt > 0 for block in blocks) / len(blocks)
        assert 60 <= sum((cell.empty, cell.cached, cell.in_use)) <= 70
        assert cell.in_use / (cell.empty + cell.cached + cell.in_use) == pytest.approx(in_use, abs=0.1)


def test_the_largest_sequences_come_first():
    pool = make(30)
    for sequence_id, num_blocks in ((1, 3), (2, 9), (3, 1), (4, 5)):
        take(pool, sequence_id, num_blocks)
    pool.pin(pool.blocks_of(4)[:2])
    shown = view(pool, num_sequences=3).sequences
    assert [(one.sequence_id, one.num_blocks) for one in shown] == [(2, 9), (4, 5), (1, 3)]
    assert [one.num_immovable_blocks for one in shown] == [0, 2, 0]


def test_prefixes_that_most_sequences_share_are_the_hottest():
    pool = make(40)
    system, chat = [b"a", b"b"], [b"a", b"b", b"c", b"d"]
    for sequence_id, hashes in enumerate((system, chat, chat, system, [b"x", b"y"])):
        share(pool, sequence_id, hashes, num_new=1)
    pool.pin(pool.blocks_of(4))  # one more reference, but no other sequence
    assert view(pool).prefixes == [
        HotPrefix(f"{ord('b'):016x}", num_tokens=8, num_sequences=4),
        HotPrefix(f"{ord('d'):016x}", num_tokens=16, num_sequences=2),
    ]
    assert len(view(pool, num_prefixes=1).prefixes) == 1


def test_requests_of_a_manager_are_listed_without_null_blocks():
    specs = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=8)]
    manager = KVCacheManager(BlockPool(100, True, 4), groups=specs)
    hasher = BlockHasher(block_size=4)
    for name in ("first", "second"):
        request = Request(name, list(range(40)), hasher)
        prefix = manager.get_computed_blocks(request)
        manager.allocate_slots(request, 40 - prefix.num_tokens, prefix)
        request.num_computed_tokens = 40
    found = view(ControlledManager(manager))
    assert found.sequences == ControlledManager(manager).describe_sequences().sequences
    assert [one.num_blocks for one in found.sequences] == [20, 13]  # the first has not left its window yet
    assert [(one.num_tokens, one.num_sequences) for one in found.prefixes] == [(36, 2)]


class TimedLock:
    """A lock that notes the longest time for which its holder has run."""

    def __init__(self, lock):
        self.lock, self.longest_ms, self.depth = lock, 0.0, 0

    def __enter__(self):
        self.lock.__enter__()
        self.depth += 1
        if self.depth == 1:
            self.since = time.thread_time_ns()

    def __exit__(self, *error):
        self.depth -= 1
        if self.depth == 0:
            self.longest_ms = max(self.longest_ms, (time.thread_time_ns() - self.since) / 1e6)
        self.lock.__exit__(*error)


@pytest.mark.parametrize("num_blocks", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_the_lock_is_held_for_less_than_a_millisecond(num_blocks):
    pool = GPUKVPool(num_blocks, 16)
    for number in range(num_blocks // 500):
        share(pool, number, [b"system", b"prompt"], num_new=430)
    assert measure_lock(pool) < 1.0


def test_a_long_sequence_is_counted_without_the_lock():
    pool = GPUKVPool(70_000, 16)
    take(pool, 1, 62_500)  # a million tokens
    pool.pin(pool.blocks_of(1))
    assert view(pool).sequences[0].num_immovable_blocks == 62_500
    assert measure_lock(pool) < 1.0


def measure_lock(pool):
    """Return the milliseconds for which a view holds the lock at most."""
    pool.lock = TimedLock(pool.lock)
    longest = []
    for _ in range(5):
        view(pool, num_cells=512, num_sequences=100)
        longest.append(pool.lock.longest_ms)
        pool.lock.longest_ms = 0.0
    return min(longest)


class ShrinkingLock:
    """A lock of a pool that shrinks to a number of blocks when the lock is taken for the nth time."""

    def __init__(self, pool, num_blocks, nth):
        self._lock, self._pool, self._num_blocks, self._left = pool.lock, pool, num_blocks, nth

    def __enter__(self):
        self._left -= 1
        if self._left == 0:
            self._pool.shrink(self._pool.block_pool.num_gpu_blocks - 1 - self._num_blocks)
        self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_map_has_no_cells_without_blocks_while_the_pool_shrinks(nth):
    pool = make(5000)
    pool.lock = ShrinkingLock(pool, 1000, nth)
    cells = view(pool, num_cells=50).map.cells
    assert len(cells) in (10, 50)
    assert all(sum((cell.empty, cell.cached, cell.in_use, cell.immovable)) for cell in cells)
