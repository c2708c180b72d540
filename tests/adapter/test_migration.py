"""Blocks that migrate to another device of this process, with their bytes."""

import pytest
from adapter.made_pool import check, draw, fill, make, make_storage, read, state, take
from drawing import hash_of

from kv_pool import (
    CopyFailedError,
    InvalidArgumentError,
    PinnedBlockError,
    PoolExhaustedError,
    UnknownDeviceError,
)
from kv_pool.core.block_keys import make_external_block_hash


def make_pair(**options):
    here, there = make(storage=make_storage()), make(5, device_id=1, storage=make_storage(6), **options)
    here.connect(there)
    take(here, 1, 2)
    take(here, 2, 1)
    take(here, 1, 1)
    take(there, 3, 1)
    fill(here)
    fill(there)
    return here, there


def test_a_sequence_migrates_with_its_bytes():
    here, there = make_pair()
    old = here.blocks_of(1)
    new = here.migrate_blocks(old, 1)
    assert there.blocks_of(1) == new
    assert [there.get_block_info(block_id).device_id for block_id in new] == [1, 1, 1]
    assert read(there, 1) == [16, 17, 18]
    assert read(there, 3) == [48]
    assert (here.blocks_of(1), here.get_free_blocks()) == ([], 9)
    assert there.migrate_blocks(new, 0)
    assert read(here, 1) == [16, 17, 18]
    check(here)
    check(there)


def test_a_result_counts_the_bytes():
    here, there = make_pair()
    result = here.try_migrate_blocks(here.blocks_of(1), 1)
    assert (result.success, result.migrated_blocks) == (True, there.blocks_of(1))
    assert result.transferred_bytes == 3 * here.block_bytes
    assert result.migration_time > 0
    refused = here.try_migrate_blocks(here.blocks_of(2), 9)
    assert (refused.success, refused.migrated_blocks, refused.transferred_bytes) == (False, [], 0)
    assert isinstance(refused.error, UnknownDeviceError)


def test_cached_blocks_can_be_hit_on_both_devices():
    here, there = make_pair()
    hashes = [hash_of(number) for number in (1, 2, 3)]
    here.cache_prefix(1, hashes[:2])
    here.migrate_blocks(here.blocks_of(1), 1)
    assert there.claim_prefix(8, hashes) == there.blocks_of(1)[:2]
    assert here.claim_prefix(9, hashes)
    assert read(there, 8) == read(here, 9) == [16, 17]
    there.cache_prefix(1, hashes)
    there.free_sequence(1)
    there.free_sequence(8)
    assert len(there.claim_prefix(8, hashes)) == 3
    assert read(there, 8) == [16, 17, 18]
    check(here)
    check(there)


def test_events_report_blocks_cached_on_the_target():
    here, there = make_pair()
    there.block_pool.enable_kv_cache_events = True
    here.cache_prefix(1, [hash_of(number) for number in (1, 2, 3)])
    here.migrate_blocks(here.blocks_of(1)[1:], 1)
    told = there.block_pool.take_events()
    external = [make_external_block_hash(hash_of(number)) for number in (1, 2, 3)]
    assert [(event.block_hashes, event.parent_block_hash) for event in told] == [
        ([external[1]], external[0]),
        ([external[2]], external[1]),
    ]
    there.free_sequence(1)
    there.block_pool.evict_blocks(range(1, 6))
    assert sorted(event.block_hashes for event in there.block_pool.take_events()) == sorted(
        [[external[1]], [external[2]]]
    )
    here.block_pool.enable_kv_cache_events = True
    here.cache_prefix(2, [hash_of(7)])
    [stored] = here.block_pool.take_events()
    assert (stored.block_hashes, stored.token_ids) == ([make_external_block_hash(hash_of(7))], [])


def test_a_pool_without_caching_receives_no_hashes():
    here, there = make_pair(enable_caching=False)
    here.cache_prefix(1, [hash_of(1)])
    here.migrate_blocks(here.blocks_of(1), 1)
    assert there.claim_prefix(8, [hash_of(1)]) == []
    check(there)


def break_copy(here, there):
    def break_off(source, target, sources, targets):
        raise OSError("the link is down")

    here.storage._copy = break_off


@pytest.mark.parametrize(
    ("hinder", "error"),
    [
        (break_copy, CopyFailedError),
        (lambda here, there: here.pin(here.blocks_of(1)[1:2]), PinnedBlockError),
        (lambda here, there: take(there, 5, 3), PoolExhaustedError),
        (lambda here, there: setattr(there, "storage", None), InvalidArgumentError),
        (lambda here, there: setattr(there, "reserved_blocks", 2), PoolExhaustedError),
    ],
    ids=["copy breaks off", "pinned", "full there", "no storage", "reserve there"],
)
def test_what_cannot_migrate_changes_nothing_on_either_side(hinder, error):
    here, there = make_pair()
    hinder(here, there)
    before = state(here), draw(there), there.get_free_blocks()
    with pytest.raises(error):
        here.migrate_blocks(here.blocks_of(1), 1)
    assert (state(here), draw(there), there.get_free_blocks()) == before
    check(here)
    check(there)


def test_unknown_devices_and_mismatched_pools_are_refused():
    here, there = make_pair()
    with pytest.raises(
        UnknownDeviceError, match=r"device 7 is not connected to device 0; the connected devices are \[1\]"
    ):
        here.migrate_blocks(here.blocks_of(1), 7)
    for migrate in (here.migrate_blocks, here.migrate_sequence):
        with pytest.raises(UnknownDeviceError, match="device 0 is the pool's own; the connected devices are"):
            migrate([1] if migrate == here.migrate_blocks else 1, 0)
    with pytest.raises(InvalidArgumentError, match="device 1 is already connected"):
        here.connect(make(device_id=1))
    with pytest.raises(InvalidArgumentError, match="device 0 is already connected"):
        here.connect(here)
    here.connect(there)  # again
