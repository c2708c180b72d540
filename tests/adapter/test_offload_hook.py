"""A full pool's sequences move to other nodes, where they go on."""

import pytest
from adapter.made_nodes import running_nodes, take_all
from adapter.made_pool import check, draw, read, take

from kv_pool import PoolExhaustedError
from kv_pool.adapter.offload_hook import OffloadHook
from kv_pool.migration.messages import NodeLocation
from kv_pool.migration.topology import Link, Nearness, Topology


def test_the_least_recently_used_sequences_move_until_the_request_fits():
    hook = OffloadHook(nodes=["b", "nobody"])
    with running_nodes(10, 10, migration_hook=hook) as (a, b):
        here, there = a.site.sequences.gpu_pool, b.site.sequences.gpu_pool
        take_all(here, 3, 3, 3)
        hook.use(here, a)
        here.note_access(1)
        assert len(take(here, 4, 4)) == 4
        assert sorted(here.list_sequences()) == [1, 3, 4]
        assert read(there, 2) == [32, 33, 34]
        assert hook.last_ranking.describe().startswith("b: elsewhere")
        assert hook.topology.get_link(Nearness.ELSEWHERE) != Topology().get_link(Nearness.ELSEWHERE)
        check(here)
        check(there)


def test_each_sequence_goes_to_the_cheapest_node_with_room_for_it():
    links = {Nearness.HOST: Link(10e9, 1e-4), Nearness.RACK: Link(1e9, 1e-3)}
    hook = OffloadHook(Topology(links), nodes=["b", "c"])
    locations = [NodeLocation(rack="r1", host=host) for host in ("h1", "h1", "h2")]
    with running_nodes(10, 3, 10, locations=locations, migration_hook=hook) as (a, b, c):
        take_all(a.site.sequences.gpu_pool, 2, 3, 5)
        hook.use(a.site.sequences.gpu_pool, a)
        take(a.site.sequences.gpu_pool, 4, 5)
        assert read(b.site.sequences.gpu_pool, 1) == [16, 17]
        assert read(c.site.sequences.gpu_pool, 2) == [32, 33, 34]
        assert [target.name for target in hook.last_ranking.targets] == ["c"]
        assert hook.last_ranking.passed_over[0].reason == "1 of 3 blocks are free, 3 are needed"


def test_a_request_is_refused_where_no_node_has_room():
    hook = OffloadHook(nodes=["b"])
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
    hook = OffloadHook(nodes=["b"])
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
