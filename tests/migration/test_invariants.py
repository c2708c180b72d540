"""The invariant checks detect damage: each table row breaks one invariant of a real migration."""

import re

import msgspec
import pytest
from migration.test_target import LOST, Bench

from kv_pool.errors import CorruptedPoolError
from kv_pool.migration import invariants
from kv_pool.migration.messages import AcknowledgeTransfer, MigrationPhase, OfferedBlock, PrefixSubject
from kv_pool.migration.site import insert_keys
from kv_pool.migration.source import Outcome, SourceTransfers, TransferState


class Stop(BaseException):
    """Raised to end a pull in its current phase, as if its thread had stopped."""


def stop():
    raise Stop


def reach(phase, **options):
    """A migration of a request of several blocks that has just entered the given phase."""
    bench = Bench(hold_s=5.0, **options)
    if phase is MigrationPhase.IN_DOUBT:
        bench.trouble = {AcknowledgeTransfer: [LOST]}
    bench.at_phase = {phase: stop}
    with pytest.raises(Stop):
        bench.pull.run()
    return bench


def check(bench):
    invariants.check(bench.source.site, bench.transfers, [], [])
    nothing_leased = SourceTransfers(bench.target.site, "target", "target@0", 1.0, bench.clock)
    unsettled = [hold for hold, _ in bench.unsettled]
    invariants.check(bench.target.site, nothing_leased, [bench.pull], unsettled)


def lease_other_blocks(bench):
    bench.transfers.list_prepared()[0].selection.blocks.reverse()


def end_a_transfer_that_is_leased(bench):
    bench.transfers._broken_off[bench.pull.transfer_id] = Outcome(TransferState.CANCELLED)


def offer_another_id(bench):
    offered = bench.transfers.list_prepared()[0].selection.offered
    offered[0] = msgspec.structs.replace(offered[0], block_id=offered[0].block_id + 7)


def let_a_block_be_hit_that_is_written(bench):
    reservation = bench.pull.reservation
    insert_keys(bench.target.pool, reservation.blocks[0], reservation.offered[0], lambda group_id: 4)


def let_a_block_in_quarantine_be_hit(bench):
    bench.unsettled.append((bench.pull.reservation.hold, None))
    bench.pull.is_inserted = True
    let_a_block_be_hit_that_is_written(bench)


def forget_the_reservation_of_a_pull_in_doubt(bench):
    bench.pull.reservation = None


def keep_reservation_at_the_end(bench):
    bench.pull.status.phase = MigrationPhase.FAILED


def write_for_no_pull(bench):
    bench.target.site.reserve(PrefixSubject(()), [OfferedBlock(1, 0)], b"")


def release_blocks_in_quarantine(bench):
    hold = bench.target.pool.holds.open([], "in quarantine")
    hold.release()
    bench.unsettled.append((hold, None))


def release_the_hold_of_a_reservation(bench):
    bench.pull.reservation.hold.release()


def hold_part_of_a_reservation(bench):
    reservation = bench.pull.reservation
    reservation.hold.remove(reservation.blocks[:1])


def hold_less_than_has_arrived(bench):
    bench.pull.new_ids.pop()


READING, IN_DOUBT, DONE = MigrationPhase.READING, MigrationPhase.IN_DOUBT, MigrationPhase.DONE
DAMAGES = [
    (READING, lease_other_blocks, "M1"),
    (READING, let_a_block_be_hit_that_is_written, "M2"),
    (READING, let_a_block_in_quarantine_be_hit, "M2"),
    (READING, keep_reservation_at_the_end, "M3"),
    (IN_DOUBT, forget_the_reservation_of_a_pull_in_doubt, "M3"),
    (READING, end_a_transfer_that_is_leased, "M4"),
    (READING, write_for_no_pull, "M5"),
    (READING, release_blocks_in_quarantine, "M5"),
    (READING, offer_another_id, "M6"),
    (READING, release_the_hold_of_a_reservation, "M7"),
    (IN_DOUBT, hold_part_of_a_reservation, "M7"),
    (DONE, hold_less_than_has_arrived, "M8"),
]


@pytest.mark.parametrize(
    ("phase", "damage", "broken"),
    DAMAGES,
    ids=[f"{broken}-{damage.__name__}" for _, damage, broken in DAMAGES],
)
def test_each_damage_fails_its_invariant(phase, damage, broken):
    bench = reach(phase, is_move=phase is not DONE)
    check(bench)
    damage(bench)
    with pytest.raises(CorruptedPoolError, match=f"^{broken}: "):
        check(bench)


def test_every_invariant_has_a_damage():
    named = set(re.findall(r"^ *(M\d)  ", invariants.__doc__, re.MULTILINE))
    assert {broken for _, _, broken in DAMAGES} == named


def test_serving_another_generation_is_detected():
    """The block is reported invalid while it is leased; then its position in the offer is changed."""
    bench = reach(READING)
    [transfer] = bench.transfers.list_prepared()
    bench.source.manager.evict_blocks([transfer.selection.offered[-1].block_id])
    check(bench)
    transfer.positions[transfer.selection.offered[-1].block_id] = 1
    with pytest.raises(CorruptedPoolError, match=r"^M6: .* served in generation"):
        check(bench)
