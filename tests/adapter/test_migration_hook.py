"""The sequences of a full pool migrate to other nodes and continue there."""

import pytest
from adapter.made_nodes import running_nodes, take_all
from adapter.made_pool import CountingClock, check, draw, make, make_storage, read, take

from kv_pool import BlockAllocationRequest, InvalidArgumentError, LRUEviction, PoolExhaustedError
from kv_pool.errors import MigrationInDoubtError
from kv_pool.migration.messages import NodeLocation
from kv_pool.migration.migration_hook import MigrationHook
from kv_pool.migration.outgoing import Push
from kv_pool.migration.topology import Link, Nearness, Topology


def test_lru_sequences_move_until_the_request_fits():
    hook = MigrationHook(nodes=["b", "missing"])
    with running_nodes(10, 10, migration_hook=hook) as (a, b):
        here, there = a.site.sequences.gpu_pool, b.site.sequences.gpu_pool
        take_all(here, 3, 3, 3)
        hook.use(here, a)
        here.note_access(1)
        assert len(take(here, 4, 4)) == 4
        assert sorted(here.list_sequences()) == [1, 3, 4]
        assert read(there, 2) == [32, 33, 34]
        assert hook.last_ranking.describe().startswith("b: elsewhere")
        assert [node.name for node in hook.last_ranking.excluded] == ["missing"]
        assert hook.topology.get_link(Nearness.ELSEWHERE) != Topology().get_link(Nearness.ELSEWHERE)
        check(here)
        check(there)


def test_a_sequence_moves_to_the_cheapest_sufficient_node():
    links = {Nearness.HOST: Link(10e9, 1e-4), Nearness.RACK: Link(1e9, 1e-3)}
    hook = MigrationHook(Topology(links), nodes=["b", "c"])
    locations = [NodeLocation(rack="r1", host=host) for host in ("h1", "h1", "h2")]
    with running_nodes(10, 3, 10, locations=locations, migration_hook=hook) as (a, b, c):
        take_all(a.site.sequences.gpu_pool, 2, 3, 5)
        hook.use(a.site.sequences.gpu_pool, a)
        take(a.site.sequences.gpu_pool, 4, 5)
        assert read(b.site.sequences.gpu_pool, 1) == [16, 17]
        assert read(c.site.sequences.gpu_pool, 2) == [32, 33, 34]
        assert [target.name for target in hook.last_ranking.targets] == ["c"]
        assert hook.last_ranking.excluded[0].reason == "1 of 3 blocks are free, 3 are needed"


@pytest.mark.parametrize("end", [None, MigrationInDoubtError("no answer"), TimeoutError("no end")])
def test_a_late_migration_has_moved_only_if_it_ends_well(end, monkeypatch):
    moved = []
    hook = MigrationHook(nodes=["b"], on_migrated=lambda *what: moved.append(what))
    waits = []

    def wait(push, timeout_s):
        waits.append(timeout_s)
        push.wait_for_end(20)
        if len(waits) == 1 or end is not None:
            raise end if len(waits) > 1 else TimeoutError

    monkeypatch.setattr(Push, "wait", wait)
    monkeypatch.setattr(Push, "cancel", lambda push: False)
    with running_nodes(10, 10, migration_hook=hook) as (a, _):
        here = a.site.sequences.gpu_pool
        take_all(here, 5, 5)
        hook.use(here, a)
        take(here, 3, 3)
    assert len(waits) == 2
    assert moved == ([(1, "b")] if end is None else [])


def test_a_request_is_refused_where_no_node_has_room():
    hook = MigrationHook(nodes=["b"])
    with running_nodes(10, 2, migration_hook=hook) as (a, b):
        here = a.site.sequences.gpu_pool
        take_all(here, 5, 5)
        with pytest.raises(PoolExhaustedError, match="Tried: the migration hook"):
            take(here, 3, 1)  # the hook has no migrator yet
        hook.use(here, a)
        before = draw(here)
        with pytest.raises(PoolExhaustedError, match="Tried: the migration hook"):
            take(here, 3, 1)
        assert (draw(here), draw(b.site.sequences.gpu_pool)) == (before, "..")


def test_sequences_of_higher_priority_stay():
    hook = MigrationHook(nodes=["b"])
    with running_nodes(6, 10, migration_hook=hook) as (a, b):
        here = a.site.sequences.gpu_pool
        take(here, 1, 3, priority=2)
        take(here, 2, 3)
        hook.use(here, a)
        take(here, 3, 3)
        assert b.site.sequences.gpu_pool.list_sequences() == [2]
        with pytest.raises(PoolExhaustedError):
            take(here, 4, 4)
        assert 1 in here.list_sequences()


# ---- by threshold --------------------------------------------------------------------------------


def test_sequences_move_before_the_threshold_is_crossed():
    moved = []
    hook = MigrationHook(on_migrated=lambda sequence_id, target: moved.append((sequence_id, target)))
    options = {"migration_hook": hook, "migration_threshold": 3, "eviction_policy": LRUEviction()}
    with running_nodes(10, 10, **options) as (a, b):
        here, there = a.site.sequences.gpu_pool, b.site.sequences.gpu_pool
        hook.use(here, a)
        take_all(here, 3, 4)
        assert moved == []
        take(here, 3, 1)
        assert moved == [(1, "b")]
        assert (here.get_free_blocks(), read(there, 1)) == (5, [16, 17, 18])
        here.allocate_many([BlockAllocationRequest(2, 4), BlockAllocationRequest(1, 5)])
        assert moved == [(1, "b"), (2, "b")]
        assert here.take_evictions() == []
        check(here)
        check(there)


def test_two_full_pools_do_not_migrate_to_each_other():
    clock = CountingClock()
    hook = MigrationHook(clock=clock, retry_s=10.0)
    options = {"migration_hook": hook, "migration_threshold": 4, "eviction_policy": LRUEviction()}
    with running_nodes(10, 6, **options) as (a, b):
        here = a.site.sequences.gpu_pool
        hook.use(here, a)
        take_all(here, 3, 3)
        asked = []
        ask, a.ask = a.ask, lambda *arguments: asked.append(clock.now) or ask(*arguments)
        for sequence_id in (3, 4):  # b would keep 3 of its 6 blocks free, not 4
            take(here, sequence_id, 1)
        assert here.list_sequences() == [1, 2, 3, 4]
        assert len(asked) == 1, "the hook asked again at once"
        clock.now += 10
        take(here, 5, 1)
        assert len(asked) == 2
        take(here, 6, 2)
        assert here.take_evictions() == [], "evicted while b had room"
        take(here, 7, 5)
        take(here, 8, 3)
        assert b.site.sequences.gpu_pool.list_sequences() == [1, 2]
        assert [eviction.sequence_id for eviction in here.take_evictions()] == [3, 4, 5]


def test_between_two_steps_an_engine_keeps_blocks_free():
    hook = MigrationHook()
    with running_nodes(10, 10) as (a, b):
        here, there = a.site.sequences.gpu_pool, b.site.sequences.gpu_pool
        assert hook.keep_free(5) == 0
        hook.use(here, a)
        take_all(here, 2, 3, 3)
        assert hook.keep_free(2) == 0
        assert hook.keep_free(5) == 2
        assert (here.list_sequences(), there.list_sequences()) == ([3], [1, 2])
        assert hook.keep_free(10) == 0, "the other pool would have no 10 blocks free"
        check(here)
        check(there)


# ---- in this process -----------------------------------------------------------------------------


def test_sequences_move_to_the_emptiest_connected_pool():
    moved = []
    hook = MigrationHook(on_migrated=lambda sequence_id, target: moved.append((sequence_id, target)))
    pool = make(9, storage=make_storage(10), migration_hook=hook)
    others = [
        make(size, device_id=number, storage=make_storage(size + 1)) for number, size in ((1, 4), (2, 6))
    ]
    for other in others:
        pool.connect(other)
    hook.use(pool)
    take_all(pool, 3, 3, 3)
    pool.fork(2, 7, 1)
    take(pool, 4, 8)
    assert moved == [(1, 2), (2, 1), (3, 2)]
    assert pool.list_sequences() == [7, 4]
    assert [read(others[1], 1), read(others[0], 2), read(pool, 7)] == [[16, 17, 18], [32, 33, 34], [32]]
    assert pool.count_free_elsewhere() == {1: 1, 2: 0}
    with pytest.raises(PoolExhaustedError, match="Tried: the migration hook"):
        take(pool, 5, 2)
    for one in (pool, *others):
        check(one)


def test_nodes_of_this_process_need_no_names():
    with running_nodes(4, 4, 4) as (a, b, c):
        assert [a.list_node_names(), c.list_node_names()] == [["b", "c"], ["a", "b"]]
        b.peers.add("d", "127.0.0.1:9")
        b.peers.add("a", "127.0.0.1:9")
        assert b.list_node_names() == ["a", "c", "d"]


@pytest.mark.parametrize(
    "options", [{"migration_threshold": 2}, {"migration_threshold": -1}, {"migration_threshold": 11}]
)
def test_a_threshold_that_cannot_be_kept_is_refused(options):
    with pytest.raises(InvalidArgumentError, match="migration_threshold is"):
        make(10, **options)
