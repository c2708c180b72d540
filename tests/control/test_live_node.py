"""A pool as a node: commands over its control socket, with real connections."""

from contextlib import contextmanager

import pytest
from adapter.made_nodes import take_all
from adapter.made_pool import check, make, make_storage, read, take
from made_threads import no_new_threads

from kv_pool import (
    BlockHasher,
    ControlError,
    InvalidArgumentError,
    KVCacheManager,
    PoolExhaustedError,
    Request,
    UnknownSequenceError,
)
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control import ControlClient, ControlledManager, ControlServer
from kv_pool.control.live_node import LiveNode
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.errors import OutOfThreadsError, PeerUnavailableError
from kv_pool.migration.messages import MigrationPhase
from kv_pool.migration.topology import Link, Nearness
from kv_pool.storage import KVStorage


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@contextmanager
def served(name, num_blocks=10, **settings):
    """Yield a client of a node over a pool with bytes, and the node."""
    pool = make(num_blocks, storage=make_storage(num_blocks + 1))
    with (
        LiveNode(pool, ServeSettings(name=name, **{"host": "h1", "device": name, **settings})) as node,
        ControlServer(pool, node=node),
        ControlClient(node=name) as client,
    ):
        yield client, node


@contextmanager
def two_nodes(**settings):
    """Yield nodes a, with sequences 1 and 2, and b, which know each other."""
    with (
        served("a", **settings) as (client, a),
        served("b", registry=a.migrator.address) as (client_of_b, b),
    ):
        take_all(a.pool, 3, 2)
        yield client, a, client_of_b, b


def wait(client, status):
    while not status.phase.is_ended:
        status = client.get_migration(status.migration_id)
    return status


def test_migration_is_reported_by_both_nodes(folder):
    with two_nodes() as (client, a, client_of_b, b):
        status = wait(client, client.migrate(1, "b"))
        assert (status.phase, status.num_blocks) == (MigrationPhase.DONE, 3)
        assert read(b.pool, 1) == [16, 17, 18]
        assert client.list_migrations().migrations == [status]
        [seen] = client_of_b.list_migrations().migrations
        assert (seen.direction, seen.peer, seen.migration_id) == ("in", "a", status.migration_id)
        assert [one.sequence_id for one in client.describe_sequences().sequences] == [2]
        wait(client, client.migrate(None, "b", is_move=False))
        assert read(a.pool, 2) == read(b.pool, 2) == [32, 33]
        check(a.pool)
        check(b.pool)


def test_node_keeps_blocks_free_by_migrating_sequences(folder):
    with (
        served("a", migration_threshold=4) as (client, a),
        served("b", registry=a.migrator.address) as (_, b),
    ):
        take_all(a.pool, 3, 3)
        assert a.pool.get_free_blocks() == 4
        assert client.list_migrations().migrations == []
        take(a.pool, 3, 1)
        while not (migrations := client.list_migrations().migrations):
            pass
        status = wait(client, migrations[0])
        assert (status.phase, status.peer) == (MigrationPhase.DONE, "b")
        assert (a.pool.list_sequences(), read(b.pool, 1)) == ([2, 3], [16, 17, 18])
        check(b.pool)


def test_peers_are_asked_and_their_nearness_is_learned(folder):
    with two_nodes() as (client, a, client_of_b, b):
        [peer] = client.list_peers().peers
        assert (peer.name, peer.address, peer.nearness) == ("b", b.migrator.address, "host")
        assert (peer.num_free_blocks, peer.num_blocks, peer.error) == (10, 10, "")
        assert a.topology.get_link(Nearness.HOST).latency_s > 0
        assert client_of_b.list_peers().peers[0].name == "a"
        wait(client, client.migrate(1, "b"))
        wait(client_of_b, client_of_b.list_migrations().migrations[0])
        assert b.topology.get_link(Nearness.HOST).bytes_per_s != Link(2.5e9, 0).bytes_per_s
    with served("c", peer=["gone=127.0.0.1:1"]) as (client, _):
        [peer] = client.list_peers().peers
        assert "cannot connect" in peer.error


def test_listing_peers_without_threads_is_a_typed_error(folder):
    with two_nodes() as (_, a, _, _):
        with no_new_threads(), pytest.raises(OutOfThreadsError, match="kv_pool peers"):
            a.list_peers()
        assert [peer.name for peer in a.list_peers().peers] == ["b"]


def test_impossible_migration_is_refused_before_it_starts(folder):
    with two_nodes() as (client, a, _, b):
        take_all(b.pool, 9)
        for sequence_id, target, error, message in (
            (7, "b", UnknownSequenceError, "sequence 7 has no blocks on node a; these have: 1, 2"),
            (1, "z", PeerUnavailableError, "node 'z' is unknown; known nodes: b"),
            (1, "b", PoolExhaustedError, "b cannot take sequence 1: 1 of 10 blocks are free, 3"),
            (1, "a", InvalidArgumentError, "'a' cannot migrate to itself; name another node. It knows: b"),
        ):
            with pytest.raises(error, match=message):
                client.migrate(sequence_id, target)
        assert client.list_migrations().migrations == []
        with pytest.raises(InvalidArgumentError, match="has no migration 'x'"):
            client.get_migration("x")
        with pytest.raises(InvalidArgumentError, match="has no migration 'x'"):
            client.cancel_migration("x")
        a.pool.free_sequence(1)
        a.pool.free_sequence(2)
        with pytest.raises(UnknownSequenceError, match="no sequence has blocks on node a"):
            client.migrate(None, "b")


def test_default_target_is_the_nearest_node_with_free_blocks(folder):
    links = ("host", 0.001), ("rack", 0.002), ("elsewhere", 0.02)
    (folder / "nodes.toml").write_text(
        "".join(f"[links.{name}]\nbytes_per_s = 1e9\nlatency_s = {seconds}\n" for name, seconds in links)
    )
    with (
        served("a", rack="r1", nodes=str(folder / "nodes.toml")) as (client, a),
        served("far", registry=a.migrator.address, host="h2", rack="r2") as _,
        served("full", 2, registry=a.migrator.address, rack="r1") as _,
        served("near", registry=a.migrator.address, host="h2", rack="r1") as (_, near),
    ):
        take_all(a.pool, 3, 2, 1)
        assert wait(client, client.migrate(1)).peer == "near"
        assert read(near.pool, 1) == [16, 17, 18]
        # The node on the same host has two free blocks.
        assert wait(client, client.migrate(2)).peer == "full"


def test_no_node_with_free_blocks_is_an_error_with_reasons(folder):
    with two_nodes(peer=["gone=127.0.0.1:1"]) as (client, a, _, b):
        take_all(b.pool, 9)
        with pytest.raises(
            PoolExhaustedError, match=r"no node can take sequence 1: b: no, 1 of 10 .* gone: no, "
        ):
            client.migrate(1)
        assert read(a.pool, 1) == [16, 17, 18]
    with served("c") as (client, c):
        take_all(c.pool, 1)
        with pytest.raises(PoolExhaustedError, match="no node can take sequence 1: no other node is known"):
            client.migrate(1)
    with served("d", peer=["gone=127.0.0.1:1"]) as (client, d):
        take_all(d.pool, 1)
        with pytest.raises(PoolExhaustedError, match=r"no node can take sequence 1: gone: no, 127\.0"):
            client.migrate(1)


@contextmanager
def served_manager(name, num_blocks=40, **settings):
    """Yield the same as `served`, over a `KVCacheManager` whose blocks have the same layout."""
    manager = KVCacheManager(RunBlockPool(num_blocks + 1, True, 4))
    face = ControlledManager(manager, storage=make_storage(num_blocks + 1))
    with (
        LiveNode(face, ServeSettings(name=name, **{"host": "h1", "device": name, **settings})) as node,
        ControlServer(face, node=node),
        ControlClient(node=name) as client,
    ):
        yield client, node


def test_target_needs_the_same_kind_of_pool_and_layout(folder):
    with (
        served("a") as (client, a),
        served_manager("other-kind", registry=a.migrator.address) as (client_of_other, other),
    ):
        take_all(a.pool, 3, 2)
        assert a.migrator.site.layout == other.migrator.site.layout
        kinds = "it takes requests of a KVCacheManager, and these are sequences of a GPUKVPool"
        with pytest.raises(PoolExhaustedError, match=f"no node can take sequence 1: other-kind: no, {kinds}"):
            client.migrate(1)
        with pytest.raises(InvalidArgumentError, match=f"node other-kind cannot take sequence 1: {kinds}"):
            client.migrate(1, "other-kind")
        wide = make(40, storage=KVStorage.allocate(41, 4, 1, 1, 8))
        with LiveNode(wide, ServeSettings(name="wide", host="h1", registry=a.migrator.address)):
            with pytest.raises(PoolExhaustedError, match="wide: no, its blocks have another layout: block_f"):
                client.migrate(1)
            assert client.list_migrations().migrations == []
            # One node can take it, farther away and with fewer free blocks than two that cannot.
            with served("far", registry=a.migrator.address, host="h2") as (_, far):
                assert wait(client, client.migrate(1)).peer == "far"
                assert read(far.pool, 1) == [16, 17, 18]
        # The opposite direction.
        request = Request("r1", range(8), BlockHasher(block_size=4))
        assert other.pool.manager.allocate_slots(request, 8) is not None
        with pytest.raises(PoolExhaustedError, match="a: no, it takes sequences of a GPUKVPool, and these"):
            client_of_other.migrate("r1")


def test_migration_uses_the_named_backend(folder):
    with two_nodes() as (client, a, _, b):
        assert wait(client, client.migrate(1, "b", backend="tcp")).phase is MigrationPhase.DONE
        assert read(b.pool, 1) == [16, 17, 18]
        with pytest.raises(InvalidArgumentError, match="node a has no backend 'nixl'; it offers tcp"):
            client.migrate(2, "b", backend="nixl")
        assert read(a.pool, 2) == [32, 33]
    with pytest.raises(InvalidArgumentError, match="unknown backend 'rdma'; known are tcp and nixl"):
        LiveNode(make(storage=make_storage()), ServeSettings(name="c", backend=["rdma"]))


def test_cancelled_migration_leaves_the_sequence(folder):
    with two_nodes() as (client, a, _, b):
        status = client.migrate(1, "b", max_bytes_per_s=10.0)
        [running] = client.view().migrations
        assert (running.peer, running.direction, running.migration_id) == ("b", "out", status.migration_id)
        assert running.phase in ("waiting", "reading")
        while not client.describe_sequences().sequences[0].is_in_transit:
            assert not client.get_migration(status.migration_id).phase.is_ended
        client.cancel_migration(status.migration_id)
        assert wait(client, status).phase is MigrationPhase.CANCELLED
        assert read(a.pool, 1) == [16, 17, 18]
        while b.pool.get_free_blocks() < 10:
            pass


def test_node_command_to_a_plain_pool_is_refused(folder):
    with ControlServer(make()), ControlClient() as client:
        assert client.describe_sequences().sequences == []
        for ask in (client.list_peers, client.list_migrations, lambda: client.migrate(1, "b")):
            with pytest.raises(ControlError, match="is not a node, so migration is not available"):
                ask()


def test_nodes_and_links_are_read_from_one_file(folder):
    with served("b") as (_, b):
        (folder / "nodes.toml").write_text(
            f'[[peers]]\nname = "b"\naddress = "{b.migrator.address}"\n'
            "[links.host]\nbytes_per_s = 1e9\nlatency_s = 0.5\n"
        )
        with served("a", nodes=str(folder / "nodes.toml"), registry="b") as (client, a):
            assert [peer.name for peer in client.list_peers().peers] == ["b"]
            assert a.topology.get_link(Nearness.HOST) == Link(1e9, 0.5)


def test_second_node_with_the_same_name_is_refused(folder):
    pool = make(storage=make_storage())
    with served("a") as (_, a):
        second = LiveNode(pool, ServeSettings(name="a", registry=a.migrator.address))
        with pytest.raises(InvalidArgumentError, match="another node is named 'a'"):
            second.__enter__()
    with pytest.raises(InvalidArgumentError, match="a node needs a name"):
        LiveNode(pool, ServeSettings())
