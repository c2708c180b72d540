import pytest
from drawing import state

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRetention,
    InvalidArgumentError,
    KVCacheManager,
    PinLimitError,
    Request,
    RetentionDirective,
)
from kv_pool.core import invariants
from kv_pool.manager.block_groups.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.retention.invariants import check_retention
from kv_pool.reports.holds import explain_block, list_holds

HASHER = BlockHasher("sha256", "s", 4)
OPTIONS = {"max_pinned_blocks": 4}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Bench:
    """A manager with a retention on a clock that stands still."""

    def __init__(self, num_blocks=8, *, groups=None, events=False, **options):
        self.clock = Clock()
        self.pool = BlockPool(num_blocks + 1, True, 4, events)
        self.retention = BlockRetention(self.pool, self.clock, **{**OPTIONS, **options})
        self.manager = KVCacheManager(self.pool, groups=groups, retention=self.retention)

    def start(self, name, tokens, *directives, session_id=None):
        request = Request(name, tokens, HASHER, session_id=session_id)
        if directives:
            self.retention.set_directives(name, directives)
        prefix = self.manager.get_computed_blocks(request)
        added = self.manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        if added is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self.check()
        return request

    def run(self, name, tokens, *directives, session_id=None):
        request = self.start(name, tokens, *directives, session_id=session_id)
        self.manager.free(request)
        self.check()
        return request

    def count_hits(self, tokens):
        request = Request("probe", tokens, HASHER)
        return self.manager.get_computed_blocks(request, len(tokens)).num_tokens

    def check(self):
        invariants.check(self.pool)
        check_retention(self.retention)

    def snapshot(self):
        retention = self.retention
        return (
            state(self.pool),
            retention.num_retained,
            retention.num_pinned,
            retention.num_pins,
            retention.list_sessions(),
            dict(retention._ranges),
        )


def prompt(number, num_blocks):
    """Return a prompt of `num_blocks` blocks; prompts of different numbers share no block."""
    return [number] * (4 * num_blocks)


def test_pinned_blocks_are_listed_by_the_end_of_their_pins():
    """They are one hold of the pool, whose list showed no end, and the age of the retention."""
    bench = Bench(8)
    bench.pool.holds.clock = bench.clock
    bench.run("a", prompt(1, 2), RetentionDirective(0, 8, duration_s=60.0, pin=True))
    bench.clock.now += 10
    bench.run("b", prompt(2, 1), RetentionDirective(0, 4, duration_s=60.0, pin=True))
    lasting = bench.run("c", prompt(3, 1), RetentionDirective(0, 4, pin=True))
    bench.clock.now += 5
    listed = list_holds(bench.pool).holds
    assert {hold.reason for hold in listed} == {"pinned by a directive"}
    ends = [(hold.block_ids, hold.remaining_s) for hold in listed]
    assert ends == [([2, 1], 45.0), ([3], 55.0), ([4], None)]
    assert [hold.age_s for hold in listed[:2]] == [15.0, 5.0]
    [held] = explain_block(bench.pool, 3).holds
    assert (held.block_ids, held.remaining_s) == ([3], 55.0)
    bench.retention.change_directives(lasting, [RetentionDirective(0, 4, duration_s=7.0, pin=True)])
    assert list_holds(bench.pool).holds[2].remaining_s == 7.0


def test_ended_sessions_are_forgotten():
    bench = Bench(8)
    request = bench.run("a", prompt(1, 1))
    for number in range(200):
        bench.clock.now = number
        bench.retention.keep_session(f"s{number}", request, number + 1)
        assert len(bench.retention._sessions) <= 64
    bench.clock.now = 300
    bench.retention.expire()
    assert not bench.retention.is_active
    assert not bench.retention.end_session("s199")
    assert repr(bench.retention).endswith(" 0 sessions>")


def test_a_refused_pin_gives_the_reason_and_changes_nothing():
    bench = Bench(8, max_pinned_blocks=3)
    request = bench.start("a", prompt(1, 2), RetentionDirective(0, 8, pin=True))
    before = bench.snapshot()
    with pytest.raises(
        PinLimitError, match="2 blocks would be pinned, and 2 others are or may become pinned; the limit is 3"
    ):
        bench.retention.set_directives("b", [RetentionDirective(0, 8, pin=True)])
    assert bench.snapshot() == before
    bench.retention.set_directives("a", [RetentionDirective(0, 12, pin=True)])
    bench.manager.free(request)
    other = bench.run("other", prompt(2, 3))
    before = bench.snapshot()
    with pytest.raises(PinLimitError, match="2 blocks would be pinned, and 2 others"):
        bench.retention.change_directives(other, [RetentionDirective(0, 8, pin=True)])
    assert bench.snapshot() == before
    assert bench.retention.change_directives(other, [RetentionDirective(0, 4, pin=True)]) == 1
    assert bench.retention.num_pins == 3
    bench.check()


@pytest.mark.parametrize(
    "words",
    [
        {"start": -1},
        {"start": 4, "end": 4},
        {"priority": 101},
        {"priority": -1},
        {"duration_s": 0},
        {"duration_s": float("inf")},
        {"duration_s": float("nan")},
        {"pin": True},
    ],
)
def test_an_invalid_directive_is_refused(words):
    with pytest.raises(InvalidArgumentError):
        RetentionDirective(**words)


def test_an_invalid_session_changes_nothing():
    bench = Bench(6)
    request = bench.run("a", prompt(1, 2))
    before = bench.snapshot()
    for words in ({"until": 100}, {"until": float("inf")}, {"until": 120, "priority": 101}):
        with pytest.raises(InvalidArgumentError):
            bench.retention.keep_session("chat", request, **words)
    assert bench.snapshot() == before


def test_sessions_do_not_pile_up_on_a_block_in_use():
    bench = Bench(6, max_sessions=3)
    always = bench.start("always", prompt(1, 2))
    for number in range(20):
        request = always if number % 3 else Request("x", prompt(1, 2), HASHER)
        bench.retention.keep_session(f"s{number}", request, bench.clock.now + 1)
        bench.clock.now += 1
    assert {len(record.claims) for record in bench.retention._placed.list_records()} == {1}


def test_all_groups_keep_blocks_also_outside_the_window():
    groups = [FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=4)]
    bench = Bench(16, groups=groups, max_pinned_blocks=16)
    request = bench.start("a", prompt(1, 4), RetentionDirective(0, 8, priority=90))
    request.append_output_token_ids([2] * 8)
    assert bench.manager.allocate_slots(request, 8) is not None
    request.num_computed_tokens = request.num_tokens
    bench.check()
    num_dropped = bench.manager.get_table("a", 1).num_null_blocks
    assert num_dropped == 3  # the second is cached and covered: a prefix that ends at token 8 can be hit
    assert bench.retention.num_retained == 1
    bench.manager.free(request)
    assert bench.retention.num_retained == 2
    bench.run("b", prompt(3, 6))
    assert bench.count_hits([*prompt(1, 2), 0]) == 8
    bench.check()


def test_a_retention_belongs_to_its_managers_pool():
    retention = BlockRetention(BlockPool(4, True, 4), Clock())
    with pytest.raises(InvalidArgumentError, match="another pool"):
        KVCacheManager(BlockPool(4, True, 4), retention=retention)
    with pytest.raises(InvalidArgumentError, match="max_pinned_blocks"):
        BlockRetention(BlockPool(4, True, 4), Clock(), -1)


def test_deadlines_of_evicted_blocks_do_not_pile_up():
    bench = Bench(4)
    for number in range(500):
        bench.run(f"r{number}", prompt(number, 2), RetentionDirective(duration_s=1000.0 + number))
    assert len(bench.retention._deadlines.entries) < 80
    assert len(bench.retention._placed.list_records()) <= 4


def test_blocks_freed_twice_are_pinned_only_as_promised():
    pool = BlockPool(12, True, 4)
    retention = BlockRetention(pool, lambda: 0.0, max_pinned_blocks=2)
    manager = KVCacheManager(pool, retention=retention)
    retention.set_directives("a", [RetentionDirective(0, 8, pin=True)])
    for name, start in (("a", 0), ("b", 100)):
        request = Request(name, range(start, start + 8), HASHER)
        manager.allocate_slots(request, 8)
        request.num_computed_tokens = 8
    for name in ("a", "b"):  # as for a request that was swapped out and came back to other blocks
        retention.note_leaving("a", 0, 0, manager.get_table(name).blocks)
        assert retention.num_pins == 2
    check_retention(retention)


def test_a_block_freed_before_it_was_full_is_pinned_when_full():
    pool = BlockPool(12, True, 4)
    retention = BlockRetention(pool, lambda: 0.0, max_pinned_blocks=2)
    manager = KVCacheManager(pool, retention=retention)
    retention.set_directives("a", [RetentionDirective(0, 8, pin=True)])
    request = Request("b", range(8), HASHER)
    manager.allocate_slots(request, 6)
    request.num_computed_tokens = 6
    retention.note_leaving("a", 0, 0, manager.get_table("b").blocks)  # as when "a" is swapped out
    assert (len(retention._placed.pinned), retention.num_pins) == (1, 2)
    manager.allocate_slots(request, 2)
    retention.note_leaving("a", 0, 0, manager.get_table("b").blocks)
    assert (len(retention._placed.pinned), retention.num_pins) == (2, 2)
    check_retention(retention)


def test_blocks_of_the_encoder_get_no_claims():
    bench = Bench(groups=[FullAttentionSpec(block_size=4), CrossAttentionSpec(block_size=4)])
    request = Request("audio", range(8), HASHER, cache_salt="s")
    bench.retention.set_directives("audio", [RetentionDirective(0, 8, priority=80)])
    assert bench.manager.allocate_slots(request, 8, num_encoder_tokens=4) is not None
    bench.manager.free(request)
    assert bench.retention.num_retained == 2
    assert bench.retention.change_directives(request, [RetentionDirective(0, 8)]) == 2
    assert bench.retention.num_retained == 0
    bench.check()
