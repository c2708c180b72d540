"""The index of the tiers: what is found, and what is evicted."""

import random

import pytest

from kv_pool.integrations.vllm.connector.tier_index import TierIndex


def blocks(*names):
    return {name.encode(): number for number, name in enumerate(names)}


def store(index, *names, max_blocks=100):
    """Plan and finish a store; return the order."""
    order = index.plan_store(blocks(*names), max_blocks)
    if order is not None:
        index.finish_store(order, True)
    return order


def evicted(order, level=0):
    """Return the keys that an order removes from a tier."""
    return [key for step in order.steps if step.level == level for key in step.evicted]


def test_a_block_is_found_once_its_store_has_finished():
    index = TierIndex(4, 0)
    order = index.plan_store(blocks("a", "b"), 100)
    assert order.blocks == blocks("a", "b")
    assert index.find_missing([b"x", b"a"]) == [0]
    assert b"a" not in index
    assert index.finish_store(order, True) == [b"a", b"b"]
    assert b"a" in index
    assert [b"a" in mapping for _, mapping in index.list_indexes()] == [True]


def test_a_later_store_of_the_same_block_counts():
    index = TierIndex(4, 0)
    first = index.plan_store(blocks("a"), 100)
    index.remove([b"a"])
    second = index.plan_store(blocks("a"), 100)
    assert index.finish_store(first, True) == []
    assert index.finish_store(second, True) == [b"a"]


def test_reopened_blocks_fill_the_disk():
    index = TierIndex(2, 2)
    assert index.add_reopened([b"a", b"b", b"c"]) == [b"a"]
    assert b"b" in index
    assert index.add_reopened([b"b", b"d"]) == [b"d"]
    assert TierIndex(2, 0).add_reopened([b"a"]) == [b"a"]


def test_a_lost_disk_has_no_blocks():
    index = TierIndex(1, 2)
    store(index, "a")
    store(index, "b")
    index.drop_last_tier()
    assert index.disk is None
    assert b"a" not in index
    assert store(index, "c").list_demoted() == []


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_match_a_slow_model(seed):
    """The model keeps lists of keys, the least recently used first."""
    rng = random.Random(seed)
    host_size, disk_size = rng.randrange(1, 6), rng.randrange(0, 8)
    index = TierIndex(host_size, disk_size)
    names = [bytes([65 + number]) for number in range(14)]
    host, disk, held, planned = [], [], [], []

    def used(tier, keys):
        for key in keys:
            if key in tier:
                tier.remove(key)
                tier.append(key)

    for _ in range(200):
        action = rng.randrange(7)
        some = rng.sample(names, rng.randrange(1, 5))
        if action == 0:
            arriving = {key for _, keys in planned for key in keys}
            new = [key for key in some if key not in host and key not in arriving]
            assert [some[place] for place in index.find_missing(some)] == new
            order = index.plan_store(dict.fromkeys(new, 0), 3)
            wanted = new[:3]
            num_free = host_size - len(host) - len(arriving)
            evictable = [key for key in host if key not in held][: max(0, len(wanted) - num_free)]
            wanted = wanted[: num_free + len(evictable)]
            if not wanted:
                assert order is None
                continue
            assert (list(order.blocks), evicted(order)) == (wanted, evictable)
            planned.append((order, wanted))
            host = [key for key in host if key not in evictable]
            if disk_size:
                used(disk, evictable)
                missing = [key for key in evictable if key not in disk]
                for start in range(0, len(missing), disk_size):
                    group = missing[start : start + disk_size]
                    num_over = max(0, len(disk) + len(group) - disk_size)
                    out = [key for key in disk if key not in held][:num_over]
                    disk = [key for key in disk if key not in out]
                    disk += group[: disk_size - len(disk)]
        elif action == 1 and planned:
            order, keys = planned.pop(rng.randrange(len(planned)))
            is_valid = rng.random() < 0.8
            assert index.finish_store(order, is_valid) == (keys if is_valid else [])
            host += keys if is_valid else []
        elif action == 2:
            index.touch(some)
            used(host, some)
            used(disk, some)
        elif action == 3:
            index.hold(some)
            held += some
            used(host, some)
            used(disk, some)
        elif action == 4 and held:
            out = rng.sample(held, rng.randrange(1, len(held) + 1))
            index.release(out)
            for key in out:
                held.remove(key)
        elif action == 5 and rng.random() < 0.3:
            index.remove(some)
            host = [key for key in host if key not in some]
            disk = [key for key in disk if key not in some]
            planned = [(order, [key for key in keys if key not in some]) for order, keys in planned]
        elif action == 6 and rng.random() < 0.05:
            index.clear()
            host, disk = [], []
            planned = [(order, []) for order, _ in planned]
        assert index.host.list_keys() == host
        assert (index.disk.list_keys() if disk_size else []) == disk
        assert index.num_arriving == sum(len(keys) for _, keys in planned)
        assert len(host) + index.num_arriving <= host_size
        assert len(disk) <= disk_size
        for key in names:
            assert (key in index) == (key in host or key in disk)
