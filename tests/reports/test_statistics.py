"""Statistics: counts agree with a full scan, and totals with what the pool has done."""

import random
import threading

import pytest
from adapter.made_pool import make, make_scattered, take

from kv_pool import LRUEviction, PoolExhaustedError
from kv_pool.reports.latency import TIMED_EVERY


def hashes(number, count):
    return [b"%d/%d" % (number, at) for at in range(count)]


def scan(pool):
    """Return the counts, computed block by block."""
    blocks = pool.block_pool.blocks[1:]
    is_free = [block.ref_cnt == 0 for block in blocks]
    runs = [len(run) for run in "".join(".x"[not free] for free in is_free).split("x") if run]
    num_free = sum(is_free)
    length = min(pool.run_length, 1 << max(0, num_free.bit_length() - 1))
    num_runs = sum(run // length for run in runs)
    num_served = sum(run // pool.run_length for run in runs) * pool.run_length
    infos = [pool.get_block_info(block.block_id) for block in blocks]
    return {
        "total_blocks": len(blocks),
        "used_blocks": len(blocks) - num_free,
        "free_blocks": num_free,
        "cached_free_blocks": sum(block.ref_cnt == 0 and block.block_hash is not None for block in blocks),
        "pinned_blocks": sum(info.is_pinned for info in infos),
        "num_sequences": len(pool.list_sequences()),
        "reserved_blocks": pool.reserved_blocks,
        "utilization": (len(blocks) - num_free) / len(blocks),
        "fragmentation_rate": pytest.approx(1 - num_runs / (num_free // length) if num_free else 0.0),
        "unusable_share": pytest.approx(1 - num_served / num_free if num_free else 0.0),
        "largest_free_run": max(runs, default=0),
        "largest_run_loss": pytest.approx(1 - max(runs) / num_free if num_free else 0.0),
    }


@pytest.mark.parametrize("seed", range(30))
def test_counts_agree_with_a_full_scan(seed):
    draw = random.Random(seed)
    eviction_policy = draw.choice([None, LRUEviction()])
    pool = make(
        24, run_length=draw.choice([1, 2, 4]), eviction_policy=eviction_policy, reserved_blocks=seed % 3
    )
    for step in range(100):
        sequences = pool.list_sequences()
        try:
            match draw.choice(["allocate", "allocate", "claim", "cache", "free", "pin", "defragment"]):
                case "allocate":
                    take(pool, draw.choice([*sequences, step]), draw.randint(1, 6))
                case "claim":
                    pool.claim_prefix(1000 + step, hashes(draw.randrange(4), 3))
                case "cache" if sequences:
                    chosen = draw.choice(sequences)
                    pool.cache_prefix(chosen, hashes(draw.randrange(4), len(pool.blocks_of(chosen))))
                case "free" if sequences:
                    chosen = draw.choice(sequences)
                    held = pool.blocks_of(chosen)
                    pool.unpin([at for at in held if pool.get_block_info(at).is_pinned], sequence_id=chosen)
                    pool.free_sequence(chosen)
                case "pin" if sequences:
                    chosen = draw.choice(sequences)
                    held = pool.blocks_of(chosen)
                    pool.pin([at for at in held if not pool.get_block_info(at).is_pinned], sequence_id=chosen)
                case "defragment":
                    pool.defragment(max_evictions=draw.choice([0, 4]))
        except PoolExhaustedError:
            pass
        statistics = pool.get_statistics()
        found = scan(pool)
        assert {name: getattr(statistics, name) for name in found} == found


def test_moved_blocks_and_the_epoch_are_counted():
    pool = make_scattered()
    moved = pool.defragment()
    assert moved > 0
    assert pool.get_statistics().moved_blocks == moved
    assert pool.get_statistics().epoch == 1


def test_evicted_sequences_are_counted():
    pool = make(eviction_policy=LRUEviction())
    take(pool, 1, 4)
    take(pool, 2, 4)
    take(pool, 3, 10)
    assert pool.get_statistics().evicted_sequences == 2


def test_lookups_and_hits_are_counted():
    pool = make()
    take(pool, 1, 3)
    pool.cache_prefix(1, hashes(7, 3))
    pool.claim_prefix(2, [*hashes(7, 2), b"another"])
    pool.claim_prefix(3, [b"nobody's"])
    statistics = pool.get_statistics()
    assert (statistics.looked_up_blocks, statistics.hit_blocks) == (4, 2)


def test_calls_are_counted_whether_they_succeed_or_not():
    pool = make()
    take(pool, 1, 4)
    with pytest.raises(PoolExhaustedError):
        take(pool, 2, 11)
    pool.free(pool.blocks_of(1)[:1])
    pool.free_many([pool.blocks_of(1)[:1], pool.blocks_of(1)[1:2]])
    pool.free_sequence(1)
    statistics = pool.get_statistics()
    assert (statistics.allocation.num_calls, statistics.freeing.num_calls) == (2, 3)
    assert 0 < statistics.allocation.median_us <= statistics.allocation.max_us


def test_refused_calls_are_timed():
    pool = make()
    for _ in range(TIMED_EVERY + 1):
        with pytest.raises(PoolExhaustedError):
            take(pool, 1, 11)
    assert pool.get_statistics().allocation.num_timed == 2


def test_counts_are_consistent_while_threads_allocate():
    pool = make(60)
    is_over = threading.Event()
    errors = []

    def work(number):
        draw = random.Random(number)
        try:
            while not is_over.is_set():
                try:
                    take(pool, number, draw.randint(1, 9))
                    pool.free_sequence(number)
                except PoolExhaustedError:
                    pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        statistics = pool.get_statistics()
        assert statistics.used_blocks + statistics.free_blocks == 60
        assert statistics.num_sequences <= statistics.used_blocks <= 9 * statistics.num_sequences
        assert statistics.largest_free_run <= statistics.free_blocks
        assert statistics.utilization == statistics.used_blocks / 60
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors
