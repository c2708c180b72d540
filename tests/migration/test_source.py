import pytest
from migration.made_nodes import Clock, MadeEngine, answer_as_source

from kv_pool import FullAttentionSpec, InvalidArgumentError, MambaSpec
from kv_pool.errors import InvalidContentError, LayoutMismatchError, MigrationError, StaleTransferError
from kv_pool.manager.block_groups.kv_cache_spec import CrossAttentionSpec
from kv_pool.manager.invariants import check_manager
from kv_pool.manager.prefix_rules import PrefixRules
from kv_pool.migration import messages
from kv_pool.migration import source as source_module
from kv_pool.migration.invariants import check_source
from kv_pool.migration.messages import PrefixSubject, SequenceSubject
from kv_pool.migration.source import SourceTransfers, TransferState, make_incarnation
from kv_pool.storage.checksums import checksum_blocks

TABLE = """
    a transfer is   prepare  checksums  renew    acknowledge   cancel      and then
    unknown         offer    stale      stale    stale         cancelled   cancelled
    leased          offer    checksums  renewed  acknowledged  cancelled   acknowledged
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


class SourceBench:
    """A source with a stopped clock and one request, whose blocks may be leased."""

    def __init__(self, is_move=True):
        self.clock = Clock()
        self.engine = MadeEngine(16, self.clock)
        self.engine.start("r", range(10))
        self.incarnation = make_incarnation("source", "1")
        self.changes = []
        self.transfers = SourceTransfers(
            self.engine.site, "source", self.incarnation, LEASE_S, self.clock, self.changes.append
        )
        self.is_move = is_move

    def ask(self, call):
        subject, layout = SequenceSubject("r"), self.engine.site.layout
        message = {
            "prepare": messages.PrepareTransfer(TRANSFER_ID, subject, self.is_move, layout, "target"),
            "checksums": messages.AskChecksums(TRANSFER_ID, [2, 0]),
            "renew": messages.RenewLease(TRANSFER_ID),
            "acknowledge": messages.AcknowledgeTransfer(TRANSFER_ID, self.incarnation, [7, 8, 9]),
            "cancel": messages.CancelTransfer(TRANSFER_ID, "why not"),
        }[call]
        return answer_as_source(self.transfers, message, self.engine.site)

    def answer(self, call):
        """Return the answer in one word."""
        try:
            reply = self.ask(call)
        except StaleTransferError:
            return "stale"
        if isinstance(reply, messages.Cancelled):
            return "too late" if reply.is_acknowledged else "cancelled"
        if call == "renew" and isinstance(reply, messages.Acknowledged):
            return "renewed"
        return type(reply).__name__.lower()

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
def test_every_call_gets_the_answer_of_the_table(call, row, is_move):
    bench = SourceBench(is_move)
    bench.bring_to(row[0])
    assert bench.answer(call) == row[HEAD.index(call)]
    bench.check()
    # A repeated call gets the same answer, except that a cancelled transfer stays cancelled.
    again = "stale" if row[0] == "unknown" and call == "acknowledge" else row[HEAD.index(call)]
    assert bench.answer(call) == again
    bench.check()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_afterwards_nothing_is_leased_and_one_side_has_it(row):
    bench = SourceBench()
    bench.bring_to(row[0])
    bench.answer("acknowledge")
    bench.answer("cancel")
    assert bench.transfers.list_prepared() == []
    assert bench.transfers.find_outcome(TRANSFER_ID).state == TransferState(row[HEAD.index("and then")])
    assert bench.is_here() == (row[HEAD.index("and then")] != "acknowledged")
    assert bench.engine.site.list_frozen() == []
    bench.check()


def test_another_callers_expire_also_ends_the_transfer():
    bench = SourceBench()
    bench.ask("prepare")
    assert not bench.is_here()
    bench.clock.now += LEASE_S
    bench.engine.site.leases.expire()  # as an offloading scheduler does in its step
    assert bench.answer("acknowledge") == "stale"
    bench.transfers.expire()
    assert bench.is_here()
    bench.check()


def test_a_move_whose_freezing_fails_ends_after_the_repair():
    """Regression: its request stayed frozen, since no transfer was left that would thaw it."""
    bench = SourceBench()

    def fail(*_):
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.engine.site, "_hold_departure", fail)
        with pytest.raises(MemoryError):
            bench.ask("prepare")
    bench.engine.manager.repair()
    bench.clock.now += LEASE_S
    bench.transfers.expire()
    assert bench.is_here()
    bench.check()


def test_on_change_is_called_once_at_start_and_end():
    bench = SourceBench()
    for call in ("prepare", "prepare", "acknowledge", "acknowledge"):
        bench.ask(call)
    assert len(bench.changes) == 2
    assert bench.transfers.find_outcome(TRANSFER_ID).new_ids == (7, 8, 9)


def test_acknowledgements_for_earlier_epochs_are_accepted():
    bench = SourceBench()
    bench.ask("prepare")
    old = messages.AcknowledgeTransfer(TRANSFER_ID, make_incarnation("source", "0"), [])
    assert bench.transfers.acknowledge(old) == messages.Acknowledged()
    assert len(bench.transfers.list_prepared()) == 1
    with pytest.raises(MigrationError, match="node 'other'; check whether two nodes have the same address"):
        bench.transfers.acknowledge(
            messages.AcknowledgeTransfer(TRANSFER_ID, make_incarnation("other", "1"), [])
        )


def test_other_layouts_and_second_uses_are_refused():
    bench = SourceBench()
    layout = bench.engine.site.layout
    other = MadeEngine(16, bench.clock, head_size=16).site.layout
    message = messages.PrepareTransfer(TRANSFER_ID, SequenceSubject("r"), True, other, "target")
    with pytest.raises(LayoutMismatchError, match="node 'target' cannot be used here: block_format"):
        bench.transfers.prepare(message)
    assert bench.is_here()
    bench.ask("prepare")
    message = messages.PrepareTransfer(TRANSFER_ID, PrefixSubject(()), False, layout, "target")
    with pytest.raises(StaleTransferError, match="already leases sequence r to node 'target'; choose"):
        bench.transfers.prepare(message)
    message = messages.PrepareTransfer(b"another one, too", SequenceSubject("r"), True, layout, "target")
    with pytest.raises(InvalidArgumentError, match="is being moved"):
        bench.transfers.prepare(message)
    assert bench.engine.site.leases.num_leased_blocks == 3
    bench.check()


def test_only_leased_blocks_of_their_generation_are_served():
    bench = SourceBench(is_move=False)
    bench.ask("prepare")
    bench.transfers.check_leased(TRANSFER_ID, [1, 2, 3])
    with pytest.raises(StaleTransferError, match="block 4 is not leased by transfer"):
        bench.transfers.check_leased(TRANSFER_ID, [1, 4])
    with pytest.raises(StaleTransferError, match="no transfer"):
        bench.transfers.check_leased(b"x" * 16, [1])


@pytest.mark.parametrize("is_move", [True, False], ids=["move", "copy"])
def test_leased_blocks_reported_invalid_are_not_served(is_move):
    bench = SourceBench(is_move)
    bench.ask("prepare")
    bench.engine.manager.evict_blocks([2])
    bench.transfers.check_leased(TRANSFER_ID, [1])
    for invalid in (2, 3):  # block 3 was computed from block 2
        with pytest.raises(InvalidContentError, match="reported content"):
            bench.transfers.check_leased(TRANSFER_ID, [1, invalid])
    with pytest.raises(InvalidContentError):
        bench.transfers.compute_checksums(messages.AskChecksums(TRANSFER_ID, [1]))
    with pytest.raises(InvalidContentError):
        bench.ask("renew")
    bench.check()
    for _ in range(2):  # the first answer may be lost
        with pytest.raises(InvalidContentError):
            bench.ask("acknowledge")
    assert bench.is_here()
    assert bench.transfers.find_outcome(TRANSFER_ID).state is TransferState.CANCELLED
    assert bench.transfers.list_prepared() == []
    bench.check()


def test_checksums_are_returned_in_the_requested_order():
    bench = SourceBench(is_move=False)
    bench.ask("prepare")
    expected = checksum_blocks(bench.engine.storage, [3, 1])
    assert bench.ask("checksums").values == expected.astype(">u8").tobytes()
    with pytest.raises(StaleTransferError, match="has 3 blocks"):
        bench.transfers.compute_checksums(messages.AskChecksums(TRANSFER_ID, [3]))


def test_checksums_fail_if_the_lease_ends_during_the_read(monkeypatch):
    bench = SourceBench(is_move=False)
    bench.ask("prepare")

    def take_long(storage, block_ids):
        bench.clock.now += LEASE_S
        return checksum_blocks(storage, block_ids)

    monkeypatch.setattr(source_module, "checksum_blocks", take_long)
    assert bench.answer("checksums") == "stale"


def test_acknowledgements_are_remembered_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(source_module, "MAX_REMEMBERED", 3)
    bench = SourceBench(is_move=False)
    bench.ask("prepare")
    bench.ask("acknowledge")
    for number in range(10):
        bench.transfers.cancel(messages.CancelTransfer(bytes([number]) * 16))
    assert bench.answer("acknowledge") == "acknowledged"
    assert bench.transfers.find_outcome(bytes([0]) * 16) is None
    assert bench.transfers.find_outcome(bytes([9]) * 16).state is TransferState.CANCELLED


@pytest.mark.parametrize(
    ("other", "rules"),
    [(MambaSpec(block_size=4), PrefixRules(bounded_states=True)), (CrossAttentionSpec(block_size=4), None)],
    ids=["bounded states", "an encoder"],
)
def test_a_prefix_is_looked_up_without_a_request(other, rules):
    """Regression: the lookup failed for want of the prompt's length, or of the encoder's inputs."""
    engine = MadeEngine(groups=[FullAttentionSpec(block_size=4), other], prefix_rules=rules)
    subject = PrefixSubject(tuple(engine.hash_blocks(range(12))))
    assert engine.site.select(subject, for_move=False).blocks == []
