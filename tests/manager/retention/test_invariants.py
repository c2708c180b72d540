"""Each invariant of a retention is broken by hand, and its check names it."""

import pytest
from damages import damages
from manager.retention.test_retention import HASHER, Bench

from kv_pool import CorruptedPoolError, Request, RetentionDirective
from kv_pool.core.deadlines import NEVER
from kv_pool.manager.retention.claims import PINNED, Record, find_band
from kv_pool.manager.retention.invariants import check_retention


def make_bench():
    """Blocks 1, 2 are kept for a minute; 3, 4 are pinned; 5 is in use and pinned; a session keeps 6, 7."""
    bench = Bench(14)
    bench.run("kept", range(8), RetentionDirective(priority=80, duration_s=60.0))
    bench.run("pinned", range(100, 108), RetentionDirective(end=8, pin=True))
    bench.start("running", range(200, 204), RetentionDirective(end=4, pin=True))
    turn = bench.start("turn", range(300, 308), session_id="chat")
    bench.retention.keep_session("chat", turn, until=200.0)
    bench.manager.free(turn)
    return bench


def find_block(bench, first_token):
    """Return the cached block of the four tokens from this one on."""
    request = Request("probe", range(first_token, first_token + 4), HASHER)
    return bench.pool.get_cached_block(request.block_hashes[0], [0])[0]


def test_a_sound_retention_passes():
    bench = make_bench()
    assert (bench.retention.num_retained, bench.retention.num_pinned, bench.retention.num_pins) == (4, 2, 3)
    check_retention(bench.retention)


def put_a_kept_block_into_another_band(bench):
    bench.pool.move_to_band([find_block(bench, 0)], 1)


def number_a_block_without_a_record(bench):
    block = bench.pool.blocks[14]
    block.retention_id = bench.retention._placed.find(find_block(bench, 0)).retention_id


def empty_a_record(bench):
    bench.retention._placed.find(find_block(bench, 0)).claims = ()


def keep_a_record_of_no_block(bench):
    records = bench.retention._placed
    record = Record(records.get_claims(find_block(bench, 0)))
    record.num_blocks = 1
    records._records.append(record)


def leave_a_pinned_block_out(bench):
    bench.retention._placed.pinned.remove(find_block(bench, 100))


def count_a_kept_block_as_pinned(bench):
    bench.retention._placed.pinned.add(find_block(bench, 0))


def free_a_pinned_block(bench):
    placed = bench.retention._placed
    placed._is_moving = True  # otherwise it would be held again
    freed = placed.held.blocks
    placed.held.remove(freed)
    bench.pool.move_to_band(freed, find_band(PINNED))
    placed._is_moving = False


def hold_a_kept_block_as_pinned(bench):
    bench.retention._placed.held._blocks[find_block(bench, 0)] = None


def lower_the_limit_of_pins(bench):
    bench.retention.max_pinned_blocks = 2


def lose_the_end_of_claims(bench):
    bench.retention._placed.find(find_block(bench, 0)).changes_at = NEVER


def lose_the_deadlines(bench):
    bench.retention.end_session("chat")
    bench.retention._deadlines.entries.clear()


def lower_the_limit_of_sessions(bench):
    bench.retention.max_sessions = 0


@damages(
    (put_a_kept_block_into_another_band, "R1"),
    (number_a_block_without_a_record, "R2"),
    (empty_a_record, "R2"),
    (keep_a_record_of_no_block, "R2"),
    (leave_a_pinned_block_out, "R3"),
    (count_a_kept_block_as_pinned, "R3"),
    (free_a_pinned_block, "R3"),
    (hold_a_kept_block_as_pinned, "R4"),
    (lower_the_limit_of_pins, "R5"),
    (lose_the_end_of_claims, "R6"),
    (lose_the_deadlines, "R6"),
    (lower_the_limit_of_sessions, "R7"),
)
def test_each_broken_retention_invariant_is_named(damage, broken):
    bench = make_bench()
    damage(bench)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        check_retention(bench.retention)
