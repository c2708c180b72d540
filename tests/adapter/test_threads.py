"""Many threads on one pool, and on two pools that migrate to each other: no block is lost or shared."""

import random
import sys
import threading

import pytest
from adapter.made_pool import check, make, make_storage, take

from kv_pool import BlockAllocationRequest, KVPoolError, PoolExhaustedError

NUM_THREADS = 8
NUM_ROUNDS = 300


@pytest.fixture(autouse=True)
def _switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_threads(work, num_threads=NUM_THREADS):
    """Run `work(number)` in `num_threads` threads at once; raise any exception of them."""
    errors = []
    start = threading.Barrier(num_threads)

    def run(number):
        try:
            start.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


def test_threads_never_share_or_lose_a_block():
    pool = make(60)
    owner = [None] * 61  # its holder, written without a lock: only the thread that got the block writes here

    def work(number):
        draw = random.Random(number)
        mine = []
        for _ in range(NUM_ROUNDS):
            try:
                ids = take(pool, number, draw.randint(1, 20), contiguous=draw.choice(["prefer", "no"]))
            except PoolExhaustedError:
                ids = []
            for block_id in ids:
                assert owner[block_id] is None
                owner[block_id] = number
            mine += ids
            draw.shuffle(mine)
            freed = [mine.pop() for _ in range(draw.randint(0, len(mine)))]
            for block_id in freed:
                assert owner[block_id] == number
                owner[block_id] = None
            pool.free(freed)
        assert sorted(pool.blocks_of(number)) == sorted(mine)
        for block_id in mine:
            owner[block_id] = None
        pool.free(mine)

    run_threads(work)
    assert pool.get_free_blocks() == 60
    check(pool)


def test_threads_can_fork_pin_batch_and_compact():
    pool = make(200, on_moved=lambda relocation: None, storage=make_storage(201))

    def work(number):
        draw = random.Random(number)
        for turn in range(NUM_ROUNDS // 3):
            first, second = 1000 * number + 2 * turn, 1000 * number + 2 * turn + 1
            try:
                pool.allocate_many([BlockAllocationRequest(draw.randint(1, 12), first, pinned=True)] * 2)
            except PoolExhaustedError:
                continue
            pool.fork(first, second)
            assert len(set(pool.blocks_of(first))) == len(pool.blocks_of(first))
            pool.unpin(pool.blocks_of(first))
            if draw.random() < 0.2:
                pool.defragment()
            pool.free_sequence(first)
            pool.free_sequence(second)

    run_threads(work)
    assert pool.get_free_blocks() == 200
    assert pool.num_pinned_blocks == 0
    check(pool)


def test_two_pools_migrate_to_each_other_without_deadlock():
    pools = make(60, storage=make_storage(61)), make(60, device_id=1, storage=make_storage(61))
    pools[0].connect(pools[1])

    def work(number):
        here, there = pools[number % 2], pools[1 - number % 2]
        for _ in range(NUM_ROUNDS // 3):
            result = here.try_allocate(BlockAllocationRequest(5, number))
            if result.success:
                here.try_migrate_blocks(result.block_ids, there.device_id)
            for pool in (here, there):
                if pool.blocks_of(number):
                    pool.free_sequence(number)

    run_threads(work)
    for pool in pools:
        assert pool.get_free_blocks() == 60
        check(pool)


def test_only_one_thread_frees_a_block():
    pool = make(50)
    ids = take(pool, 1, 50)
    freed = []

    def work(number):
        for block_id in ids:
            try:
                pool.free([block_id])
            except KVPoolError:
                continue
            freed.append(block_id)

    run_threads(work)
    assert sorted(freed) == sorted(ids)
    check(pool)
