"""Whole migrations between nodes of one process, and over TCP."""

import threading
import time

import pytest
from made_threads import no_new_threads
from migration.made_nodes import BLOCK_SIZE, HASHER, Clock, MadeEngine, make_node

from kv_pool import (
    BlockHasher,
    FullAttentionSpec,
    InvalidArgumentError,
    InvalidBlockError,
    MambaSpec,
    OutOfBlocksError,
    SlidingWindowSpec,
    UnknownSequenceError,
)
from kv_pool.errors import (
    LayoutMismatchError,
    MigrationCancelledError,
    MigrationError,
    MigrationInDoubtError,
    OutOfThreadsError,
    PeerUnavailableError,
    StaleTransferError,
)
from kv_pool.manager.invariants import check_manager
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.messages import BlocksSubject, MigrationPhase, PrefixSubject, SequenceSubject
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.pool_site import PoolSite

PATIENCE_S = 30.0
SECRET = b"sixteen bytes, or more"


class Pair:
    """Two engines with their nodes, connected in process or over TCP."""

    def __init__(self, over, **options):
        self.a, self.b = MadeEngine(**options.pop("a", {})), MadeEngine(**options.pop("b", {}))
        self.nodes = []
        for name, engine in (("a", self.a), ("b", self.b)):
            if over == "in_process":
                node = make_node(name, engine, **options)
            else:
                node = Migrator(
                    name,
                    engine.site,
                    backends=[TcpBackend(engine.storage)],
                    secret=SECRET,
                    listen="127.0.0.1:0",
                    **options,
                )
            node.start()
            self.nodes.append(node)
        self.node_a, self.node_b = self.nodes
        if over == "in_process":
            self.node_a.connect(self.node_b)
        else:
            self.node_a.peers.add("b", self.node_b.address)
            self.node_b.peers.add("a", self.node_a.address)

    def check(self):
        for node, engine in zip(self.nodes, (self.a, self.b), strict=True):
            node.check_invariants()
            check_manager(engine.manager, engine.requests.values())
            assert engine.site.leases.list_leases() == []
            for request_id in engine.requests:
                engine.check_bytes(request_id)

    def stop(self):
        for node in self.nodes:
            node.stop()


@pytest.fixture
def make_pair():
    made = []

    def make(over="in_process", **options):
        made.append(Pair(over, **options))
        return made[-1]

    yield make
    for pair in made:
        pair.stop()


@pytest.fixture(params=["in_process", "tcp"])
def over(request):
    return request.param


def test_a_request_moves_with_its_blocks_and_state(make_pair, over):
    pair = make_pair(over)
    request = pair.a.start("r", range(10))
    num_free = pair.a.pool.get_num_free_blocks()
    new_ids = pair.node_a.migrate(SequenceSubject("r"), "b").wait(PATIENCE_S)
    assert new_ids == pair.b.manager.get_block_ids("r") == [1, 2, 3]
    assert pair.a.moved_away == {"r": "b"}
    assert not pair.a.manager.holds_blocks("r")
    assert pair.a.pool.get_num_free_blocks() == num_free + 3
    there = pair.b.requests["r"]
    assert (there.all_token_ids, there.num_computed_tokens) == (request.all_token_ids, 10)
    pair.check()
    with pair.b.lock:  # and goes on
        there.append_output_token_ids([10, 11, 12])
        assert pair.b.manager.allocate_slots(there, 3) is not None
        there.num_computed_tokens = 13
        assert pair.b.manager.get_block_ids("r") == [1, 2, 3, 4]


def test_a_copied_prefix_is_hit_and_announced(make_pair, over):
    pair = make_pair(over)
    request = pair.a.start("r", range(12))
    subject = PrefixSubject(tuple(request.block_hashes))
    assert pair.node_b.fetch(subject, "a").wait(PATIENCE_S) == [1, 2, 3]
    assert pair.b.pool.get_num_free_blocks() == 31
    assert pair.b.check_prefix(range(12)) == 3
    stored = pair.b.manager.take_events()
    assert [event.block_hashes[0] for event in stored] == [
        int.from_bytes(block_hash[-8:], "big") for block_hash in request.block_hashes
    ]
    assert [event.parent_block_hash for event in stored] == [
        None,
        stored[0].block_hashes[0],
        stored[1].block_hashes[0],
    ]
    assert pair.a.manager.holds_blocks("r")
    pair.check()


def test_missing_blocks_are_read_in_one_piece_if_contiguous(make_pair, over):
    pair = make_pair(over)
    pair.a.start("r", range(40))
    pair.b.start("other", [*range(20), 99])
    pair.node_b.fetch(SequenceSubject("r"), "a", is_move=True).wait(PATIENCE_S)
    (status,) = pair.node_b.list_migrations()
    assert (status.num_blocks, status.num_present_blocks, status.num_done_blocks) == (10, 5, 10)
    assert pair.node_b.count_migrations()["done"] == 1
    assert (status.num_bytes, status.num_descriptors) == (5 * pair.b.storage.block_bytes, 1)
    assert pair.b.manager.get_block_ids("r")[:5] == pair.b.manager.get_block_ids("other")[:5]
    pair.check()


def test_copies_leave_everything_at_the_source(make_pair, over):
    pair = make_pair(over)
    pair.a.start("r", range(10))
    pair.node_a.migrate(SequenceSubject("r"), "b", is_move=False).wait(PATIENCE_S)
    assert pair.a.manager.get_block_ids("r") == pair.b.manager.get_block_ids("r")
    pair.a.start("cached", range(100, 112))
    ids = pair.a.manager.get_block_ids("cached")[::-1]
    pair.a.finish("cached")
    generations = tuple(pair.a.pool.blocks[block_id].generation for block_id in ids)
    pair.node_b.fetch(BlocksSubject(tuple(ids), generations), "a").wait(PATIENCE_S)
    assert pair.b.check_prefix(range(100, 112)) == 3
    subject = PrefixSubject(tuple(HASHER.hash_blocks(range(500, 508))))  # nowhere
    assert pair.node_b.fetch(subject, "a").wait(PATIENCE_S) == []
    pair.check()


@pytest.mark.parametrize(
    "groups",
    [
        [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=6)],
        [FullAttentionSpec(block_size=4), MambaSpec(block_size=8)],
    ],
    ids=["window", "mamba"],
)
def test_all_groups_of_a_request_move_together(make_pair, groups):
    pair = make_pair(a={"groups": groups}, b={"groups": groups})
    pair.a.start("r", range(30))
    tables = [pair.a.manager.get_block_ids("r", group_id) for group_id in range(2)]
    pair.node_a.migrate(SequenceSubject("r"), "b").wait(PATIENCE_S)
    for group_id, table in enumerate(tables):
        there = pair.b.manager.get_block_ids("r", group_id)
        assert [block_id == 0 for block_id in there] == [block_id == 0 for block_id in table]
    pair.check()


# ---- refused migrations --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "is_move", "error", "message"),
    [
        (SequenceSubject("nobody"), True, UnknownSequenceError, "has no blocks here"),
        (BlocksSubject((99,)), False, InvalidBlockError, "not one of 1 to 31"),
        (
            BlocksSubject((9,)),
            False,
            InvalidBlockError,
            "block 9 belongs to .* not cached",
        ),
        (BlocksSubject((1,)), True, InvalidBlockError, "copied, not moved"),
        (BlocksSubject((1, 1)), False, InvalidBlockError, "listed twice"),
        (BlocksSubject((1,), (7,)), False, StaleTransferError, "generation was 7 and is now 1"),
    ],
)
def test_a_source_refuses_unknown_subjects(make_pair, over, subject, is_move, error, message):
    pair = make_pair(over)
    pair.a.start("r", range(10))
    migration = pair.node_b.fetch(subject, "a", is_move=is_move)
    with pytest.raises(error, match=message):
        migration.wait(PATIENCE_S)
    assert migration.get_status().phase is MigrationPhase.FAILED
    assert pair.node_b.count_migrations()["failed"] == 1
    assert pair.node_a.list_migrations() == []
    assert pair.a.manager.holds_blocks("r")
    pair.check()


REFUSALS = {
    "full": ({}, {"num_blocks": 4}, OutOfBlocksError, "cannot reserve 4 blocks for a migration: 3 of 3 are"),
    "id in use": ({}, {}, InvalidArgumentError, "request 'r' already has blocks at this node"),
    "layout": ({}, {"head_size": 16}, LayoutMismatchError, r"block_format is .* here and .* there"),
    "model": (
        {"weights": "r1"},
        {"weights": "r2"},
        LayoutMismatchError,
        "weights is 'r2' here and 'r1' there",
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_refusing_target_leaves_the_source_unchanged(make_pair, over, reason):
    a, b, error, message = REFUSALS[reason]
    pair = make_pair(over, a=a, b=b)
    pair.a.start("r", range(16))
    if reason == "id in use":
        pair.b.start("r", range(5))
    with pytest.raises(error, match=message):
        pair.node_b.fetch(SequenceSubject("r"), "a", is_move=True).wait(PATIENCE_S)
    with pytest.raises(error, match=message):
        pair.node_a.migrate(SequenceSubject("r"), "b").wait(PATIENCE_S)
    assert pair.a.manager.holds_blocks("r")
    pair.check()


def test_another_hash_seed_is_another_layout():
    engine = MadeEngine()
    hasher = BlockHasher("sha256", seed="other", block_size=BLOCK_SIZE)
    other = PoolSite(ManagerSequences(engine.manager, engine.storage), hasher=hasher)
    with pytest.raises(LayoutMismatchError, match="hash_seed"):
        engine.site.layout.check_same(other.layout, "node 'b'")
    assert SECRET not in engine.site.layout.hash_seed.encode()


def test_an_unknown_peer_is_named_with_the_known_ones(make_pair, over):
    pair = make_pair(over)
    with pytest.raises(PeerUnavailableError, match="node 'c' is unknown"):
        pair.node_b.fetch(SequenceSubject("r"), "c").wait(PATIENCE_S)
    pair.a.start("r", range(5))
    with pytest.raises(PeerUnavailableError, match="node 'c' is unknown"):
        pair.node_a.migrate(SequenceSubject("r"), "c").wait(PATIENCE_S)
    pair.check()


def test_invalid_calls_raise(make_pair):
    pair = make_pair()
    for call in (pair.node_b.fetch, pair.node_b.migrate):
        with pytest.raises(InvalidArgumentError, match="cannot be moved, only copied"):
            call(PrefixSubject(()), "a", is_move=True)
        with pytest.raises(InvalidArgumentError, match="must be 0"):
            call(PrefixSubject(()), "a", is_move=False, max_bytes_per_s=-1.0)
        with pytest.raises(InvalidArgumentError, match="'b' cannot migrate to itself"):
            call(SequenceSubject("r"), "b")
    for hold_s in (-1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="hold_s is"):
            pair.node_b.fetch(PrefixSubject(()), "a", hold_s=hold_s)
    assert pair.node_b.list_migrations() == []
    pair.node_b.stop()
    with pytest.raises(MigrationError, match="is not running"):
        pair.node_b.fetch(PrefixSubject(()), "a")
    with pytest.raises(InvalidArgumentError, match="create a new one"):
        pair.node_b.start()
    with pytest.raises(PeerUnavailableError):
        pair.node_a.fetch(PrefixSubject(()), "b").wait(PATIENCE_S)
    with pytest.raises(InvalidArgumentError, match="both nodes are named 'a'"):
        pair.node_a.connect(make_node("a", pair.b))
    for wrong, message in (({"listen": "127.0.0.1:0"}, "secret"), ({"lease_s": 0.0}, "lease")):
        with pytest.raises(InvalidArgumentError, match=message):
            make_node("c", pair.a, **wrong)


def test_a_node_continues_after_a_thread_failed_to_start(make_pair):
    pair = make_pair()
    request = pair.a.start("r", range(12))
    subject = PrefixSubject(tuple(request.block_hashes))
    with no_new_threads():
        with pytest.raises(OutOfThreadsError):
            pair.node_b.fetch(subject, "a")
        with pytest.raises(OutOfThreadsError):
            pair.node_a.migrate(SequenceSubject("r"), "b")
        silent = make_node("c", MadeEngine(), listen="127.0.0.1:0", secret=SECRET)
        with pytest.raises(OutOfThreadsError):
            silent.start()
    assert silent.address == ""
    assert pair.node_a.list_migrations() == pair.node_b.list_migrations() == []
    assert pair.node_b.fetch(subject, "a").wait(PATIENCE_S) == [1, 2, 3]
    pair.check()


# ---- during a migration --------------------------------------------------------------------------


class Gate:
    """An `on_phase` callback that blocks the migrations to a node in one phase."""

    def __init__(self, phase):
        self.place = ("in", phase)
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, status):
        if (status.direction, status.phase) == self.place and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


def test_a_moving_request_cannot_be_used(make_pair):
    gate = Gate(MigrationPhase.READING)
    pair = make_pair(on_phase=gate)
    request = pair.a.start("r", range(10))
    migration = pair.node_a.migrate(SequenceSubject("r"), "b")
    assert gate.reached.wait(PATIENCE_S)
    assert pair.a.site.list_frozen() == ["r"]
    request.append_output_token_ids([10])
    for use in (
        lambda: pair.a.manager.free(request),
        lambda: pair.a.manager.allocate_slots(request, 1),
        lambda: pair.a.manager.can_allocate(request, 1),
        lambda: pair.a.manager.cache_blocks(request, 10),
        lambda: pair.a.manager.get_block_ids("r"),
    ):
        with (
            pair.a.lock,
            pytest.raises(InvalidArgumentError, match=r"'r' .*: it is being moved to"),
        ):
            use()
    other = pair.node_b.fetch(SequenceSubject("r"), "a")
    with pytest.raises(InvalidArgumentError, match="is being moved to another node"):
        other.wait(PATIENCE_S)
    with pytest.raises(TimeoutError, match="is still reading after 0"):
        pair.node_b.find_migration(migration.migration_id).wait(0)
    pair.node_a.check_invariants()
    pair.node_b.check_invariants()
    gate.opened.set()
    assert len(migration.wait(PATIENCE_S)) == 3
    pair.check()
    with pair.a.lock, pytest.raises(InvalidArgumentError, match="never allocated, or freed"):
        pair.a.manager.get_block_ids("r")


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize(
    "phase", [MigrationPhase.PREPARING, MigrationPhase.READING, MigrationPhase.INSERTING]
)
def test_cancel_leaves_both_nodes_unchanged(make_pair, over, who, phase):
    gate = Gate(phase)
    pair = make_pair(over, on_phase=gate)
    pair.a.start("r", range(10))
    migration = pair.node_a.migrate(SequenceSubject("r"), "b")
    assert gate.reached.wait(PATIENCE_S)
    there = pair.node_b.find_migration(migration.migration_id)
    assert (migration if who == "source" else there).cancel() is True
    gate.opened.set()
    with pytest.raises(MigrationCancelledError):
        migration.wait(PATIENCE_S)
    assert there.wait_for_end(PATIENCE_S)
    assert pair.a.manager.holds_blocks("r")
    assert not pair.b.manager.holds_blocks("r")
    assert pair.b.pool.get_num_free_blocks() == 31
    assert migration.cancel() is False
    pair.check()


def test_cancel_returns_false_after_the_acknowledgement(make_pair, over):
    gate = Gate(MigrationPhase.DONE)
    pair = make_pair(over, on_phase=gate)
    pair.a.start("r", range(10))
    migration = pair.node_a.migrate(SequenceSubject("r"), "b")
    assert gate.reached.wait(PATIENCE_S)
    assert migration.cancel() is False
    assert pair.node_b.find_migration(migration.migration_id).cancel() is False
    gate.opened.set()
    migration.wait(PATIENCE_S)
    pair.check()


def test_phases_are_ordered_and_callback_errors_are_ignored(make_pair):
    seen = []

    def note(status):
        seen.append((status.direction, status.phase.value))
        raise ValueError("mine")

    pair = make_pair(on_phase=note)
    pair.a.start("r", range(10))
    pair.node_b.fetch(SequenceSubject("r"), "a", is_move=True).wait(PATIENCE_S)
    incoming = [phase for direction, phase in seen if direction == "in"]
    assert list(dict.fromkeys(incoming)) == [
        "waiting",
        "preparing",
        "reading",
        "inserting",
        "acknowledging",
        "done",
    ]
    assert [phase for direction, phase in seen if direction == "out"] == ["reading", "done"]


def test_migrations_above_the_limit_wait(make_pair, over):
    pair = make_pair(over, max_concurrent=2, a={"num_blocks": 200}, b={"num_blocks": 200})
    for number in range(30):
        pair.a.start(f"r{number}", range(100 * number, 100 * number + 17))
    migrations = [pair.node_a.migrate(SequenceSubject(f"r{number}"), "b") for number in range(30)]
    assert all(len(migration.wait(PATIENCE_S)) == 5 for migration in migrations)
    assert len(pair.b.requests) == 30
    assert pair.a.pool.get_num_free_blocks() == 199
    pair.check()


def test_idle_readers_are_not_used_after_the_address_has_changed(make_pair):
    pair = make_pair("tcp")
    links, source = pair.node_b._links, pair.node_b.ask("a")
    for reader in [links.take_reader(source) for _ in range(3)]:
        links.return_reader(source, reader)
    pair.node_b.peers.add("a", pair.node_a.address.replace("127.0.0.1", "localhost"))
    pair.a.start("r", range(10))
    assert len(pair.node_b.fetch(SequenceSubject("r"), "a").wait(PATIENCE_S)) == 3


def test_wait_raises_in_doubt_and_can_be_repeated(make_pair):
    def lose_the_source(status):
        if (status.direction, status.phase) == ("in", MigrationPhase.ACKNOWLEDGING):
            pair.node_b.peers.add("a", "127.0.0.1:1")  # an address without a listener

    pair = make_pair("tcp", lease_s=0.2, on_phase=lose_the_source)
    pair.a.start("r", range(10))
    migration = pair.node_b.fetch(SequenceSubject("r"), "a", is_move=True)
    with pytest.raises(MigrationInDoubtError, match="has not confirmed that it released 3 blocks"):
        migration.wait()
    with pytest.raises(MigrationInDoubtError):
        migration.wait(0.01)
    pair.node_b.check_invariants()
    pair.node_b.peers.add("a", pair.node_a.address)
    assert migration.wait_for_end(PATIENCE_S)
    with pytest.raises(StaleTransferError):
        migration.wait()
    assert pair.a.manager.holds_blocks("r")
    assert not pair.b.manager.holds_blocks("r")
    pair.check()


def test_a_stopping_node_ends_its_leases_and_holds(make_pair, over):
    gate = Gate(MigrationPhase.READING)
    pair = make_pair(over, on_phase=gate)
    request = pair.b.start("held", range(50, 62))
    gate.opened.set()
    pair.node_a.fetch(PrefixSubject(tuple(request.block_hashes)), "b", hold_s=600.0).wait(PATIENCE_S)
    assert pair.a.pool.get_num_free_blocks() == 28
    pair.a.start("r", range(10))
    gate.reached.clear()
    gate.opened.clear()
    migration = pair.node_b.fetch(SequenceSubject("r"), "a", is_move=True)
    assert gate.reached.wait(PATIENCE_S)
    pair.node_a.stop()
    assert pair.a.manager.holds_blocks("r")
    assert pair.a.pool.get_num_free_blocks() == 28
    gate.opened.set()
    with pytest.raises(MigrationError):
        migration.wait(PATIENCE_S)
    pair.check()


@pytest.mark.parametrize("is_of_the_node", [True, False])
def test_a_short_migration_obeys_its_rate_limit(make_pair, is_of_the_node):
    """Regression: the first tenth of a second's bytes, and any single block, ignored the limit."""
    rate = 8.0 * MadeEngine().storage.block_bytes
    pair = make_pair(**({"max_bytes_per_s": rate} if is_of_the_node else {}))
    request = pair.a.start("r", range(16))
    began = time.monotonic()
    limit = {} if is_of_the_node else {"max_bytes_per_s": rate}
    migration = pair.node_b.fetch(PrefixSubject(tuple(request.block_hashes)), "a", **limit)
    assert len(migration.wait(PATIENCE_S)) == 4
    assert time.monotonic() - began >= 4 / 8


class HeardClock(Clock):
    """A clock that lets a test wait until it was read a number of times."""

    def __init__(self):
        super().__init__()
        self.asked = threading.Semaphore(0)

    def __call__(self):
        self.asked.release()
        return super().__call__()

    def wait_for(self, num_calls):
        while self.asked.acquire(blocking=False):
            pass
        for _ in range(num_calls):
            assert self.asked.acquire(timeout=PATIENCE_S)


def test_housekeeping_ends_holds(make_pair):
    clock = HeardClock()
    pair = make_pair(a={"clock": clock}, b={"clock": clock}, clock=clock, lease_s=0.2)
    request = pair.a.start("r", range(12))
    migration = pair.node_b.fetch(PrefixSubject(tuple(request.block_hashes)), "a", hold_s=60.0)
    migration.wait(PATIENCE_S)
    clock.now += 59.0
    clock.wait_for(30)  # some rounds of both nodes' housekeeping
    with pair.b.lock:
        assert pair.b.pool.get_num_free_blocks() == 28
    clock.now += 1.0
    clock.wait_for(30)
    with pair.b.lock:
        assert pair.b.pool.get_num_free_blocks() == 31
    migration.release()
    pair.check()


def test_housekeeping_renews_the_lease_of_a_late_reader(make_pair):
    clock = HeardClock()
    gate = Gate(MigrationPhase.READING)

    def read_late(status):
        if (status.direction, status.phase) == gate.place:
            clock.now += 0.19
        gate(status)

    pair = make_pair(a={"clock": clock}, b={"clock": clock}, clock=clock, lease_s=0.2, on_phase=read_late)
    pair.a.start("r", range(12))
    migration = pair.node_a.migrate(SequenceSubject("r"), "b")
    assert gate.reached.wait(PATIENCE_S)
    clock.wait_for(100)  # some rounds of both nodes' housekeeping
    clock.now += 0.19
    clock.wait_for(100)
    gate.opened.set()
    assert migration.wait(PATIENCE_S) == pair.b.manager.get_block_ids("r")
    pair.check()


def test_the_last_thousand_ended_migrations_are_listed(make_pair):
    gate = Gate(MigrationPhase.DONE)
    pair = make_pair(on_phase=gate)
    pair.a.start("r", range(4))
    subject = PrefixSubject(tuple(pair.a.requests["r"].block_hashes))
    ids = [pair.node_b.fetch(subject, "a").migration_id]
    assert gate.reached.wait(PATIENCE_S)  # it is done, and its end is reported last
    for number in range(1, 1006):
        migration = pair.node_b.fetch(subject, "a", hold_s=60.0 * (number in (2, 3)))
        migration.wait(PATIENCE_S)
        ids.append(migration.migration_id)
    # Held ones are listed besides.
    listed = [status.migration_id for status in pair.node_b.list_migrations()]
    assert listed == [ids[0], *ids[2:4], *ids[6:]]
    gate.opened.set()
    with pytest.raises(InvalidArgumentError, match="running: none"):
        pair.node_b.find_migration(ids[1])
    pair.node_b.find_migration(ids[2]).release()
    pair.node_b.fetch(subject, "a").wait(PATIENCE_S)
    listed = [status.migration_id for status in pair.node_b.list_migrations()]
    assert listed[:2] == [ids[0], ids[3]]
