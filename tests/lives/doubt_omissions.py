"""Planted omissions of migrations: answers, leases and checks of a source or of a pull."""

from lives.omissions import Omission

from kv_pool.errors import StaleTransferError
from kv_pool.migration.messages import Acknowledged
from kv_pool.migration.source import TransferState

SOURCE = "kv_pool.migration.source"
TARGET = "kv_pool.migration.target"


def acknowledge_always(original):
    def acknowledge(transfers, message):
        try:
            return original(transfers, message)
        except StaleTransferError:
            return Acknowledged()

    return acknowledge


def forget_acknowledged(original):
    def remember(transfers, transfer_id, outcome):
        original(transfers, transfer_id, outcome)
        if outcome.state is TransferState.ACKNOWLEDGED:
            transfers._acknowledged.popitem()
            transfers._broken_off[transfer_id] = outcome

    return remember


def find_nothing_wrong(original):
    return lambda transfers, transfer: False


def extend_no_lease(original):
    def extend(transfers, transfer):
        transfer.deadline = transfers._clock() + transfers._lease_s

    return extend


def stay_frozen(original):
    return lambda site, subject: None


def keep_lease(original):
    def end(transfers, transfer, outcome):
        transfer.lease = None
        original(transfers, transfer, outcome)

    return end


def adopt_in_doubt(original):
    return lambda pull, error: pull._adopt()


def leave_in_doubt(original):
    return lambda pull, error: pull._end_with_copy(error)


def verify_nothing(original):
    return lambda reads, batch, asked: []


def hold_nothing(original):
    return lambda pull, reservation: None


def keep_write_lease(original):
    def release_lease(pull):
        pull.lease = None

    return release_lease


DOUBT_OMISSIONS = [
    Omission(
        "a source acknowledges what it has kept",
        "manager",
        SOURCE,
        "SourceTransfers.acknowledge",
        acknowledge_always,
    ),
    Omission(
        "a source forgets what it has acknowledged",
        "adapter",
        SOURCE,
        "SourceTransfers._remember",
        forget_acknowledged,
    ),
    Omission(
        "a source does not notice wrong content",
        "manager",
        SOURCE,
        "SourceTransfers._has_invalid_content",
        find_nothing_wrong,
    ),
    Omission("a renewal extends no lease", "adapter", SOURCE, "SourceTransfers._extend", extend_no_lease),
    Omission(
        "a sequence stays frozen", "manager", "kv_pool.migration.pool_site", "PoolSite.thaw", stay_frozen
    ),
    Omission("a lease outlives its transfer", "adapter", SOURCE, "SourceTransfers._end", keep_lease),
    Omission(
        "a target in doubt takes the sequence over", "adapter", TARGET, "Pull._stay_in_doubt", adopt_in_doubt
    ),
    Omission(
        "a target in doubt gives the sequence up", "adapter", TARGET, "Pull._stay_in_doubt", leave_in_doubt
    ),
    Omission(
        "a target compares no checksums",
        "manager",
        "kv_pool.migration.verified_reads",
        "VerifiedReads._verify",
        verify_nothing,
    ),
    Omission("what has arrived is not held", "manager", TARGET, "Pull._hold", hold_nothing),
    Omission("a pull keeps its lease to write", "adapter", TARGET, "Pull._release_lease", keep_write_lease),
]
