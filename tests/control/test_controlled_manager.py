"""A `KVCacheManager` engine over its control socket: reports, compaction, refusals, migration."""

import random
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from migration.made_nodes import BLOCK_SIZE, MadeEngine

from kv_pool import BlockPool, ControlError, InvalidBlockError, UnknownSequenceError
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.control import ControlClient, ControlledManager, ControlServer
from kv_pool.control.live_node import LiveNode
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.core.invariants import check
from kv_pool.manager.block_groups.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec
from kv_pool.migration.messages import MigrationPhase

GROUPS = [
    FullAttentionSpec(block_size=BLOCK_SIZE),
    SlidingWindowSpec(block_size=BLOCK_SIZE, sliding_window=8),
]
POOLS = pytest.mark.parametrize("pool_class", [RunBlockPool, BlockPool])


class Served:
    """An engine, its tables of ids, and its manager as a `ControlledManager`."""

    def __init__(self, pool_class=RunBlockPool, run_length=4, **options):
        self.engine = MadeEngine(pool_class=pool_class, **options)
        self.relocations = []
        self.face = ControlledManager(
            self.engine.manager,
            storage=self.engine.storage,
            lock=self.engine.lock,
            on_moved=self.relocations.append,
            requests=self.engine.requests,
            run_length=run_length,
        )


@contextmanager
def asked(face, tmp_path):
    with ControlServer(face, tmp_path / "c.sock"), ControlClient(tmp_path / "c.sock") as client:
        yield client


def make_prompt(number, num_blocks=2):
    return range(1000 * number, 1000 * number + num_blocks * BLOCK_SIZE)


def scatter(engine, count=8):
    """Start requests of two blocks each, free every second one, and leave nothing cached."""
    for number in range(count):
        engine.start(f"r{number}", make_prompt(number))
    for number in range(0, count, 2):
        blocks = engine.manager.get_block_ids(f"r{number}")
        engine.finish(f"r{number}")
        engine.manager.evict_blocks(blocks)


def draw(face):
    return "".join("0.*#P"[state] for state in face.get_layout().states)


# ---- reports -----------------------------------------------------------------------------------------


@POOLS
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_blocks_of_all_groups_are_counted_with_their_requests(pool_class, groups):
    served = Served(pool_class, num_blocks=64, groups=groups)
    engine, face = served.engine, served.face
    for number in range(6):
        engine.start(f"r{number}", make_prompt(number % 3, 1 + number))
    tables = [
        engine.manager.get_block_ids(request_id, group_id)
        for request_id in engine.requests
        for group_id in range(len(engine.manager.groups))
    ]
    holders = Counter(block_id for table in tables for block_id in table if block_id)
    layout = face.get_layout()
    assert list(layout.holders) == [holders[block_id] for block_id in range(64)]
    assert any(one > 1 for one in layout.holders)
    statistics = face.get_statistics()
    assert (statistics.num_sequences, statistics.used_blocks) == (6, len(holders))


@POOLS
def test_socket_returns_the_same_reports_as_the_manager(pool_class, tmp_path):
    served = Served(pool_class)
    scatter(served.engine)
    with asked(served.face, tmp_path) as client:
        assert client.get_statistics() == served.face.get_statistics()
        assert client.get_layout() == served.face.get_layout()
        assert client.describe_sequences() == served.face.describe_sequences()
    assert served.face.get_statistics().allocation is None


def test_requests_are_listed_with_tokens_holds_and_migrations(tmp_path):
    served = Served()
    engine = served.engine
    for number in range(3):
        engine.start(f"r{number}", make_prompt(number))
    blocks = engine.manager.get_table("r1").blocks
    with asked(served.face, tmp_path) as client, engine.pool.hold(blocks[:1], "leased to a test"):
        tables = engine.manager.pop_tables("r0")
        engine.manager.detached_requests["r0"] = "it is being moved to another node"
        reports = client.describe_sequences().sequences
        engine.manager.put_tables("r0", tables)
        del engine.manager.detached_requests["r0"]
        assert [
            (one.sequence_id, one.num_blocks, one.num_tokens, one.num_immovable_blocks, one.is_in_transit)
            for one in reports
        ] == [("r1", 2, 8, 1, False), ("r2", 2, 8, 0, False), ("r0", 0, 8, 0, True)]
        [first, *_] = client.describe_sequences().sequences
        assert (first.priority, first.idle_s) == (None, None)


@POOLS
def test_holds_are_listed_with_reasons_and_ages(pool_class, tmp_path):
    served = Served(pool_class)
    engine = served.engine
    engine.start("r", make_prompt(1, 3))
    blocks = engine.manager.get_table("r").blocks
    now = engine.pool.holds.clock()
    leased = engine.pool.hold(blocks[:2], "leased to a test", until=now + 1000)
    engine.pool.hold(blocks[1:], "watched by a test", movable=True)
    with asked(served.face, tmp_path) as client:
        found = client.list_holds()
        assert [(one.reason, one.block_ids, one.is_movable) for one in found.holds] == [
            ("leased to a test", [blocks[0].block_id, blocks[1].block_id], False),
            ("watched by a test", [blocks[1].block_id, blocks[2].block_id], True),
        ]
        assert 0 < found.holds[0].remaining_s <= 1000
        assert found.holds[0].age_s >= 0
        assert found.holds[1].remaining_s is None
        both = client.list_holds(blocks[1].block_id).holds
        assert [one.reason for one in both] == ["leased to a test", "watched by a test"]
        assert client.list_holds(blocks[0].block_id).holds[0].block_ids == [blocks[0].block_id]
        leased.release()
        assert client.list_holds(blocks[0].block_id).holds == []
        with pytest.raises(InvalidBlockError, match="block 99 is not one of 1 to 31"):
            client.list_holds(99)


# ---- compaction --------------------------------------------------------------------------------------


def test_compaction_over_the_socket_moves_requests_and_bytes(tmp_path):
    served = Served(num_blocks=17)
    engine = served.engine
    scatter(engine)
    before = {name: engine.manager.get_block_ids(name) for name in engine.requests}
    assert draw(served.face) == "0..##..##..##..##"
    with asked(served.face, tmp_path) as client:
        report = client.defragment()
        assert client.get_statistics().moved_blocks == report.moved_blocks == 4
        assert report.run_length == 4
        assert report.time_ms > 0
    assert draw(served.face) == "0########........"
    assert (report.fragmentation_rate_before, report.fragmentation_rate_after) == (1.0, 0.0)
    for name, table in before.items():
        remap = served.relocations[0].make_remap()
        for relocation in served.relocations[1:]:
            remap = relocation.make_remap()[remap]
        assert remap[np.array(table)].tolist() == engine.manager.get_block_ids(name)
        engine.check_bytes(name)
    check(engine.pool)


# ---- refusals ----------------------------------------------------------------------------------------


def test_compacting_a_pool_without_runs_is_refused(tmp_path):
    served = Served(BlockPool)
    with (
        asked(served.face, tmp_path) as client,
        pytest.raises(
            ControlError, match=r"RunBlockPool can be moved, and this manager has a BlockPool: create it"
        ),
    ):
        client.defragment()


@pytest.mark.parametrize("missing", ["storage", "on_moved"])
def test_compaction_without_storage_or_on_moved_is_refused(tmp_path, missing):
    engine = MadeEngine(pool_class=RunBlockPool)
    given = {"storage": engine.storage, "on_moved": lambda relocation: None}
    del given[missing]
    face = ControlledManager(engine.manager, lock=engine.lock, **given)
    with asked(face, tmp_path) as client, pytest.raises(ControlError, match="pass storage and on_moved"):
        client.defragment()


def test_manager_without_storage_cannot_be_a_node():
    with pytest.raises(ControlError, match="migration moves the bytes of requests"):
        LiveNode(ControlledManager(MadeEngine().manager), ServeSettings(name="a"))


# ---- migration ---------------------------------------------------------------------------------------


@contextmanager
def node(name, **settings):
    served = Served()
    with (
        LiveNode(served.face, ServeSettings(name=name, host="h1", **settings), owner=served.engine) as live,
        ControlServer(served.face, node=live),
        ControlClient(node=name) as client,
    ):
        yield client, served.engine, live


def test_requests_migrate_over_the_socket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with (
        node("a") as (client, here, live),
        node("b", registry=live.migrator.address) as (_, there, _),
    ):
        for number in range(3):
            here.start(f"r{number}", make_prompt(number))
        for sequence_id, moved in (("r0", "r0"), (None, "r2")):
            status = client.migrate(sequence_id, "b")
            while not status.phase.is_ended:
                status = client.get_migration(status.migration_id)
            assert status.phase is MigrationPhase.DONE, status.error_message
            there.check_bytes(moved)
        assert sorted(there.requests) == ["r0", "r2"]
        assert sorted(here.requests) == ["r1"]
        with pytest.raises(UnknownSequenceError, match="sequence 7 has no blocks on node a; these have: r1"):
            client.migrate(7, "b")


# ---- while the engine steps --------------------------------------------------------------------------


def test_server_replies_and_compacts_while_the_engine_steps(tmp_path):
    served = Served(num_blocks=65)
    engine = served.engine
    is_over = threading.Event()
    errors = []

    def work():
        rng = random.Random(0)
        try:
            step = 0
            # Between steps an engine waits for its device and does not hold the lock.
            while not is_over.wait(0.0002):
                step += 1
                with engine.lock:
                    if engine.pool.get_num_free_blocks() > 20:
                        engine.start(f"r{step}", make_prompt(rng.randrange(20), rng.randint(1, 5)))
                    else:
                        name = rng.choice(sorted(engine.requests))
                        engine.check_bytes(name)
                        engine.finish(name)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with asked(served.face, tmp_path) as client:
            moved = num_rounds = 0
            # The engine takes its time to scatter the blocks on a busy machine.
            while num_rounds < 60 or (not moved and num_rounds < 6000):
                num_rounds += 1
                statistics = client.get_statistics()
                assert statistics.used_blocks + statistics.free_blocks == 64
                layout = client.get_layout()
                held = sum(holders > 0 for holders in layout.holders)
                assert held == 64 - layout.num_free
                listed = client.describe_sequences().sequences
                assert all(one.num_tokens == BLOCK_SIZE * one.num_blocks for one in listed)
                assert client.list_holds().holds == []
                moved += client.defragment(max_moves=4, max_evictions=4).moved_blocks
    finally:
        is_over.set()
        thread.join()
    assert not errors
    assert moved > 0
    for name in engine.requests:
        engine.check_bytes(name)
    check(engine.pool)
