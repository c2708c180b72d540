"""Calls of a `BlockRetention` that a signal handler interrupts: each block is kept, in use or free."""

import contextlib
import itertools
import random

import pytest
from interrupting import interrupt_at_both, interrupt_everywhere, interrupt_twice_at_random

from kv_pool import BlockHasher, BlockPool, BlockRetention, KVCacheManager, Request, RetentionDirective
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.mode import COMPILED
from kv_pool.errors import KVPoolError
from kv_pool.manager.invariants import check_leases, check_manager
from kv_pool.manager.leases import BlockLeases
from kv_pool.manager.retention.invariants import check_retention

HASHER = BlockHasher("sha256", "s", 4)
POOLS = {"blocks": BlockPool, "runs": RunBlockPool}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Bench:
    """Prompts that are kept for several reasons, and two running requests that share a prefix."""

    def __init__(self, pool_class=BlockPool):
        self.clock = Clock()
        self.pool = pool_class(31, True, 4, enable_kv_cache_events=True)
        self.retention = BlockRetention(self.pool, self.clock, max_pinned_blocks=6, max_sessions=2)
        self.manager = KVCacheManager(self.pool, retention=self.retention)
        self.leases = BlockLeases(self.pool, self.clock)
        self.requests = {}
        self.run("low", 200, RetentionDirective(0, 12, priority=10))
        self.run("high", 300, RetentionDirective(0, 12, priority=90), RetentionDirective(4, 8, 95))
        self.run("short", 400, RetentionDirective(0, 8, priority=80, duration_s=5.0))
        self.run("pinned", 500, RetentionDirective(0, 8, pin=True, duration_s=50.0))
        self.run("plain", 600)
        self.run("chat", 700, session_id="one")
        self.retention.keep_session("one", self.requests["chat"], until=150.0)
        self.start("running", 300, RetentionDirective(0, 16, priority=70), num_tokens=16)
        self.start("sharing", 300, RetentionDirective(0, 8, pin=True, duration_s=9.0), num_tokens=16)
        self.lease = self.leases.acquire(self.find("short"), 150.0, "reader")
        self.manager.take_events()

    def make(self, name, start, num_tokens=12, session_id=None):
        request = Request(name, range(start, start + num_tokens), HASHER, session_id=session_id)
        self.requests[name] = request
        return request

    def start(self, name, start, *directives, num_tokens=12, session_id=None):
        request = self.make(name, start, num_tokens, session_id)
        self.retention.set_directives(name, directives)
        prefix = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        request.num_computed_tokens = request.num_tokens
        return request

    def run(self, name, start, *directives, session_id=None):
        self.manager.free(self.start(name, start, *directives, session_id=session_id))

    def find(self, name):
        """Return the cached blocks of the request's prompt."""
        hashes = self.requests[name].block_hashes
        return [block for one in hashes for block in self.pool.get_cached_block(one, [0]) or ()]

    def admit(self, name, start, num_tokens, session_id=None):
        request = self.make(name, start, num_tokens, session_id)
        prefix = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, num_tokens - prefix.num_tokens, prefix)

    def wait(self, seconds):
        self.clock.now += seconds

    def check(self):
        self.retention.list_sessions()
        self.pool.get_new_blocks(0)
        check_retention(self.retention)
        invariants.check(self.pool)
        check_leases(self.leases)
        check_manager(self.manager, self.requests.values())
        retention = self.retention
        assert not retention._sessions.list_lost(retention._records, self.pool.blocks, self.clock.now)
        for name in self.retention._directives.by_request:
            assert self.manager.holds_blocks(name), f"{name} is gone, and its directives count"
        assert len(self.pool.holds.list_holds()) == len(self.leases.list_leases()) + 1  # the hold of the pins


def end_claims(bench):
    bench.wait(20)
    assert bench.retention.num_pins >= 0


def end_session(bench):
    bench.wait(60)
    assert bench.retention.num_retained >= 0


def forget(bench):
    blocks = bench.find("high")
    bench.pool.evict_blocks([block.block_id for block in blocks])
    bench.retention.forget_blocks(blocks)


RETENTION_CALLS = {
    "directives set": lambda bench: bench.retention.set_directives(
        "running", [RetentionDirective(0, 8, pin=True), RetentionDirective(8, 16, priority=5)]
    ),
    "directives changed": lambda bench: bench.retention.change_directives(
        bench.requests["high"], [RetentionDirective(0, 8, priority=3), RetentionDirective(4, 12, pin=True)]
    ),
    "directives of free blocks": lambda bench: bench.retention.change_directives(
        bench.requests["plain"], [RetentionDirective(0, 12, priority=60)]
    ),
    "directives taken off": lambda bench: bench.retention.change_directives(
        bench.requests["pinned"], [RetentionDirective(0, 12)]
    ),
    "a session kept": lambda bench: bench.retention.keep_session("two", bench.requests["low"], 140.0),
    "a session kept of a running request": lambda bench: bench.retention.keep_session(
        "two", bench.requests["running"], 140.0
    ),
    "a session kept again": lambda bench: bench.retention.keep_session("one", bench.requests["high"], 140.0),
    "a session ended": lambda bench: bench.retention.end_session("one"),
    "claims over": end_claims,
    "a session over": end_session,
    "blocks claimed": lambda bench: bench.retention.set_priority(bench.find("running"), 95),
    "blocks forgotten": lambda bench: forget(bench),
    "all released": lambda bench: bench.retention.release_all(),
    "a request forgotten": lambda bench: bench.retention.forget_request("sharing"),
}
MANAGER_CALLS = {
    "admitted": lambda bench: bench.admit("new", 200, 20),
    "admitted with much": lambda bench: bench.admit("new", 400, 36),
    "admitted for a session": lambda bench: bench.admit("new", 700, 20, "one"),
    "growing": lambda bench: bench.manager.allocate_slots(bench.requests["running"], 24),
    "freed": lambda bench: bench.manager.free(bench.requests["running"]),
    "freed with pins": lambda bench: bench.manager.free(bench.requests["sharing"]),
    "evicted": lambda bench: bench.manager.evict_blocks({one.block_id for one in bench.find("pinned")}),
}
LEASE_CALLS = {
    "leased from what is kept": lambda bench: bench.leases.acquire(bench.find("low"), 150.0, "other"),
    "leased while in use": lambda bench: bench.leases.acquire(bench.find("high"), 150.0, "other"),
    "released": lambda bench: bench.lease.release(),
}
CALLS = {**RETENTION_CALLS, **MANAGER_CALLS, **LEASE_CALLS}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_leaves_each_block_in_one_state(name, pool):
    tried, broken = interrupt_everywhere(lambda: Bench(POOLS[pool]), CALLS[name], Bench.check)
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"


def make_pinning(*directives):
    """Return a retention with two pins, its manager, and a running request of two blocks, "a"."""
    pool = BlockPool(12, True, 4)
    retention = BlockRetention(pool, lambda: 0.0, max_pinned_blocks=2)
    manager = KVCacheManager(pool, retention=retention)
    request = Request("a", range(8), HASHER)
    retention.set_directives("a", directives)
    manager.allocate_slots(request, 8)
    request.num_computed_tokens = 8
    return retention, manager, request


PIN = RetentionDirective(0, 8, pin=True)


@pytest.mark.parametrize(
    ("before", "after"), [((), (PIN,)), ((PIN,), ()), ((PIN,), (RetentionDirective(0, 4, pin=True),))]
)
def test_interrupted_directives_are_set_or_unchanged(before, after):
    counts = [sum(-(-one.end // 4) for one in directives) for directives in (before, after)]

    def check(made):
        retention, manager, request = made
        assert retention.num_pins in counts
        num_promised = retention.num_pins
        manager.free(request)
        assert (retention.num_pinned, retention.num_pins) == (num_promised, num_promised)

    tried, broken = interrupt_everywhere(
        lambda: make_pinning(*before), lambda made: made[0].set_directives("a", after), check
    )
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def test_blocks_being_pinned_are_counted_once():
    def label(made):
        retention, manager, _ = made
        retention.label_table("a", 0, 0, manager.get_table("a").blocks)

    def check(made):
        retention, manager, request = made
        assert retention.num_pins == 2
        check_retention(retention)
        manager.free(request)
        assert (retention.num_pinned, retention.num_pins) == (2, 2)

    tried, broken = interrupt_everywhere(lambda: make_pinning(PIN), label, check)
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def check_later(bench):
    """Check after calls that complete an interrupted recovery."""
    with contextlib.suppress(KVPoolError):
        bench.manager.allocate_slots(bench.requests["running"], 0)
    bench.leases.expire()
    bench.check()


@pytest.mark.parametrize("name", ["directives taken off", "all released", "a request forgotten"])
def test_a_recovery_may_be_interrupted_at_its_start(name):
    for moment in itertools.count(1):
        bench = Bench()
        num_left, _ = interrupt_at_both(moment, 1, lambda bench=bench: CALLS[name](bench))
        check_later(bench)
        if num_left > 0:
            break


@pytest.mark.parametrize("pool", ["blocks", pytest.param("runs", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_recovery_leaves_each_block_in_one_state(name, pool):
    rng = random.Random(f"{name} {pool}")
    tried, broken = interrupt_twice_at_random(lambda: Bench(POOLS[pool]), CALLS[name], check_later, rng, 20)
    assert tried > 0 or COMPILED
    assert not broken, f"{name}: {len(broken)} of {tried}: {broken[:3]}"
