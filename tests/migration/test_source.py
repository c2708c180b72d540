import pytest
from migration.made_nodes import Clock, MadeEngine

from kv_pool import InvalidArgumentError
from kv_pool.errors import InvalidContentError, LayoutMismatchError, MigrationError, StaleTransferError
from kv_pool.manager.invariants import check_manager
from kv_pool.migration import source as source_module
from kv_pool.migration.invariants import check_source
from kv_pool.migration.messages import (
    Acknowledged,
    AcknowledgeTransfer,
    AskChecksums,
    Cancelled,
    CancelTransfer,
    PrepareTransfer,
    RenewLease,
)
from kv_pool.migration.source import SourceTransfers, TransferState, make_epoch
from kv_pool.migration.subjects import PrefixSubject, SequenceSubject
from kv_pool.storage.checksums import checksum_blocks

TABLE = """
    a transfer is   prepare  checksums  renew    acknowledge   cancel      and then
    unknown         offer    stale      stale    stale         cancelled   cancelled
    lent            offer    checksums  renewed  acknowledged  cancelled   acknowledged
    overdue         stale    stale      stale    stale         cancelled   cancelled
    acknowledged    stale    stale      stale    acknowledged  too late    acknowledged
    expired         stale    stale      stale    stale         cancelled   expired
    cancelled       stale    stale      stale    stale         cancelled   cancelled
"""
HEAD, *ROWS = [
    [cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in TABLE.strip().splitlines()
]
TRANSFER_ID = b"sixteen letters!"
LEASE_S = 10.0


class Lender:
    """A source whose clock stands still, with one request, which may be lent."""

    def __init__(self, is_move=True):
        self.clock = Clock()
        self.engine = MadeEngine(16, self.clock)
        self.engine.start("r", range(10))
        self.epoch = make_epoch("source", "1")
        self.changes = []
        self.transfers = SourceTransfers(
            self.engine.site, "source", self.epoch, LEASE_S, self.clock, self.changes.append
        )
        self.is_move = is_move

    def ask(self, call):
        match call:
            case "prepare":
                subject, layout = SequenceSubject("r"), self.engine.site.layout
                return self.transfers.prepare(
                    PrepareTransfer(TRANSFER_ID, subject, self.is_move, layout, "target")
                )
            case "checksums":
                return self.transfers.compute_checksums(AskChecksums(TRANSFER_ID, [2, 0]))
            case "renew":
                return self.transfers.renew(RenewLease(TRANSFER_ID))
            case "acknowledge":
                return self.transfers.acknowledge(AcknowledgeTransfer(TRANSFER_ID, self.epoch, [7, 8, 9]))
            case _:
                return self.transfers.cancel(CancelTransfer(TRANSFER_ID, "why not"))

    def answer(self, call):
        """In one word."""
        try:
            reply = self.ask(call)
        except StaleTransferError:
            return "stale"
        if isinstance(reply, Cancelled):
            return "too late" if reply.is_acknowledged else "cancelled"
        return {
            "Offer": "offer",
            "Checksums": "checksums",
            "LeaseRenewed": "renewed",
            "Acknowledged": "acknowledged",
        }[type(reply).__name__]

    def bring_to(self, state):
        if state != "unknown":
            self.ask("prepare")
        if state in ("overdue", "expired"):
            self.clock.now += LEASE_S
        if state == "expired":
            self.transfers.expire()
        if state == "acknowledged":
            self.ask("acknowledge")
        if state == "cancelled":
            self.ask("cancel")

    def check(self):
        check_source(self.transfers)
        check_manager(self.engine.manager, self.engine.requests.values())

    def is_here(self):
        return self.engine.manager.holds_blocks("r")


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
@pytest.mark.parametrize("call", ["prepare", "checksums", "renew", "acknowledge", "cancel"])
def test_every_call_is_answered_as_the_table_says(call, row, is_move):
    lender = Lender(is_move)
    lender.bring_to(row[0])
    assert lender.answer(call) == row[HEAD.index(call)]
    lender.check()
    # A call that comes again is answered the same, but that a cancelled transfer stays so.
    again = "stale" if row[0] == "unknown" and call == "acknowledge" else row[HEAD.index(call)]
    assert lender.answer(call) == again
    lender.check()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_in_the_end_nothing_is_lent_and_one_side_has_it(row):
    lender = Lender()
    lender.bring_to(row[0])
    lender.answer("acknowledge")
    lender.answer("cancel")
    assert lender.transfers.list_lent() == []
    assert lender.transfers.find_outcome(TRANSFER_ID).state == TransferState(row[HEAD.index("and then")])
    assert lender.is_here() == (row[HEAD.index("and then")] != "acknowledged")
    assert lender.engine.site.list_frozen() == []
    lender.check()


def test_a_lease_lasts_as_long_as_it_is_renewed():
    lender = Lender()
    lender.ask("prepare")
    for _ in range(5):
        lender.clock.now += LEASE_S - 1
        assert lender.answer("renew") == "renewed"
        lender.transfers.expire()
    assert len(lender.transfers.list_lent()) == 1
    lender.clock.now += LEASE_S
    lender.transfers.expire()
    assert lender.transfers.list_lent() == []
    assert lender.is_here()


def test_whoever_ends_the_lease_the_request_is_used_again():
    lender = Lender()
    lender.ask("prepare")
    assert not lender.is_here()
    lender.clock.now += LEASE_S
    lender.engine.site.leases.expire()  # as an offloading scheduler does in its step
    assert lender.answer("acknowledge") == "stale"
    lender.transfers.expire()
    assert lender.is_here()
    lender.check()


def test_what_was_lent_is_told_once_and_when_it_ended():
    lender = Lender()
    lender.ask("prepare")
    lender.ask("prepare")
    lender.ask("acknowledge")
    lender.ask("acknowledge")
    assert len(lender.changes) == 2
    assert lender.transfers.find_outcome(TRANSFER_ID).new_ids == (7, 8, 9)


def test_an_acknowledgement_of_an_earlier_life_is_accepted_and_of_another_node_is_not():
    lender = Lender()
    lender.ask("prepare")
    old = AcknowledgeTransfer(TRANSFER_ID, make_epoch("source", "0"), [])
    assert lender.transfers.acknowledge(old) == Acknowledged()
    assert len(lender.transfers.list_lent()) == 1
    with pytest.raises(MigrationError, match="node 'other'; do two nodes have one address"):
        lender.transfers.acknowledge(AcknowledgeTransfer(TRANSFER_ID, make_epoch("other", "1"), []))


def test_one_id_is_one_transfer():
    lender = Lender()
    lender.ask("prepare")
    layout = lender.engine.site.layout
    other = PrepareTransfer(TRANSFER_ID, PrefixSubject(()), False, layout, "target")
    with pytest.raises(StaleTransferError, match="lends sequence r to node 'target'; choose another id"):
        lender.transfers.prepare(other)


def test_a_target_with_other_blocks_is_refused_before_anything_is_lent():
    lender = Lender()
    other = MadeEngine(16, lender.clock, head_size=16).site.layout
    message = PrepareTransfer(TRANSFER_ID, SequenceSubject("r"), True, other, "target")
    with pytest.raises(
        LayoutMismatchError, match="blocks of node 'target' can not be used here: block_format"
    ):
        lender.transfers.prepare(message)
    assert lender.is_here()
    assert lender.answer("prepare") == "offer"


def test_a_request_is_moved_by_one_transfer_at_a_time():
    lender = Lender()
    lender.ask("prepare")
    layout = lender.engine.site.layout
    second = PrepareTransfer(b"another one, too", SequenceSubject("r"), True, layout, "target")
    with pytest.raises(InvalidArgumentError, match="is being moved"):
        lender.transfers.prepare(second)
    assert lender.engine.site.leases.num_lent_blocks == 3
    lender.check()


def test_only_blocks_that_are_lent_as_they_were_offered_are_served():
    lender = Lender(is_move=False)
    lender.ask("prepare")
    lender.transfers.check_lent(TRANSFER_ID, [1, 2, 3])
    with pytest.raises(StaleTransferError, match="block 4 is not one of those"):
        lender.transfers.check_lent(TRANSFER_ID, [1, 4])
    with pytest.raises(StaleTransferError, match="no transfer"):
        lender.transfers.check_lent(b"x" * 16, [1])


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
def test_content_that_is_reported_wrong_while_lent_is_not_served(is_move):
    lender = Lender(is_move)
    lender.ask("prepare")
    lender.engine.manager.evict_blocks([2])
    lender.transfers.check_lent(TRANSFER_ID, [1, 3])
    with pytest.raises(InvalidContentError, match="has reported content"):
        lender.transfers.check_lent(TRANSFER_ID, [1, 2])
    with pytest.raises(InvalidContentError):
        lender.transfers.compute_checksums(AskChecksums(TRANSFER_ID, [1]))
    with pytest.raises(InvalidContentError):
        lender.ask("renew")
    lender.check()
    for _ in range(2):  # the first answer may be lost
        with pytest.raises(InvalidContentError):
            lender.ask("acknowledge")
    assert lender.is_here()
    assert lender.transfers.find_outcome(TRANSFER_ID).state is TransferState.CANCELLED
    assert lender.transfers.list_lent() == []
    lender.check()


def test_checksums_are_those_of_the_blocks_in_the_order_that_was_asked_for():
    lender = Lender(is_move=False)
    lender.ask("prepare")
    expected = checksum_blocks(lender.engine.storage, [3, 1])
    assert lender.ask("checksums").values == expected.astype(">u8").tobytes()
    with pytest.raises(StaleTransferError, match="has 3 blocks"):
        lender.transfers.compute_checksums(AskChecksums(TRANSFER_ID, [3]))


def test_checksums_of_blocks_that_were_taken_back_meanwhile_are_not_told(monkeypatch):
    lender = Lender(is_move=False)
    lender.ask("prepare")

    def take_long(storage, block_ids):
        lender.clock.now += LEASE_S
        return checksum_blocks(storage, block_ids)

    monkeypatch.setattr(source_module, "checksum_blocks", take_long)
    assert lender.answer("checksums") == "stale"


def test_acknowledgements_are_remembered_apart_and_not_for_ever(monkeypatch):
    monkeypatch.setattr(source_module, "MAX_REMEMBERED", 3)
    lender = Lender(is_move=False)
    lender.ask("prepare")
    lender.ask("acknowledge")
    for number in range(10):
        lender.transfers.cancel(CancelTransfer(bytes([number]) * 16))
    assert lender.answer("acknowledge") == "acknowledged"
    assert lender.transfers.find_outcome(bytes([0]) * 16) is None
    assert lender.transfers.find_outcome(bytes([9]) * 16).state is TransferState.CANCELLED
