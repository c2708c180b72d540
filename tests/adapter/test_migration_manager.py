"""Sequences and blocks migrate to other nodes by a call of the pool or of the manager."""

import pytest
from adapter.made_nodes import running_nodes, take_all
from adapter.made_pool import check, make, read

from kv_pool import InvalidArgumentError, PoolExhaustedError, UnknownDeviceError, UnknownSequenceError
from kv_pool.adapter import KVPoolMigrationManager
from kv_pool.errors import PeerUnavailableError


def test_migrate_to_remote_returns_old_and_new_ids():
    with running_nodes(10, 10) as (a, b):
        here, there = a.site.sequences.gpu_pool, b.site.sequences.gpu_pool
        take_all(here, 2, 3)
        take_all(there, 1)
        there.free_sequence(1)
        manager = KVPoolMigrationManager(here, a)
        old = here.blocks_of(2)
        result = manager.migrate_to_remote(2, "b")
        assert result == {"old_blocks": old, "new_blocks": there.blocks_of(2), "target_node": "b"}
        assert read(there, 2) == [32, 33, 34]
        assert here.list_sequences() == [1]
        check(here)
        check(there)


def test_a_target_may_be_named_by_its_device():
    with running_nodes(10, 10) as (a, b):
        take_all(a.site.sequences.gpu_pool, 2)
        a.site.sequences.gpu_pool.attach(a, {5: "b"})
        manager = KVPoolMigrationManager(a.site.sequences.gpu_pool, a)
        assert manager.migrate_to_remote(1, 5)["target_node"] == 5
        assert read(b.site.sequences.gpu_pool, 1) == [16, 17]
        with pytest.raises(UnknownDeviceError, match=r"device 6 is not connected to device 0.*\[5\]"):
            manager.migrate_to_remote(1, 6)


def test_a_failed_migration_leaves_the_sequence():
    with running_nodes(10, 2) as (a, _):
        here = a.site.sequences.gpu_pool
        take_all(here, 3)
        manager = KVPoolMigrationManager(here, a)
        for sequence_id, target, error in (
            (9, "b", UnknownSequenceError),
            (1, "z", PeerUnavailableError),
            (1, "b", PoolExhaustedError),
        ):
            with pytest.raises(error):
                manager.migrate_to_remote(sequence_id, target)
        assert read(here, 1) == [16, 17, 18]
        check(here)
        with pytest.raises(InvalidArgumentError, match="the migrator of node 'a' belongs to another pool"):
            KVPoolMigrationManager(make(), a)


def test_blocks_migrate_to_a_node_that_is_attached_as_a_device():
    with running_nodes(10, 10) as (a, b):
        here, there = a.site.sequences.gpu_pool, b.site.sequences.gpu_pool
        take_all(here, 3)
        here.attach(a, {1: "b"})
        new_ids = here.migrate_blocks(here.blocks_of(1)[1:], 1)
        assert there.blocks_of(1) == new_ids
        assert (read(here, 1), read(there, 1)) == ([16], [17, 18])
        assert here.migrate_blocks([], 1) == []
        result = here.try_migrate_blocks(here.blocks_of(1), 1)
        assert (result.success, result.transferred_bytes) == (True, here.block_bytes)
        assert read(there, 1) == [17, 18, 16]
        with pytest.raises(InvalidArgumentError, match="device 0 is already connected"):
            here.attach(a, {0: "b"})
        with pytest.raises(InvalidArgumentError, match="device 1 is already connected"):
            here.connect(there)
        check(here)
        check(there)
