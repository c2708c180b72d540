"""What kv_pool raises when the caller made a mistake, or the pool is full.

Every error is a `KVPoolError`, and also the built-in that callers of vLLM v1 already catch in that
place, so neither `except KVPoolError` nor `except ValueError` misses one:

| error | also a | raised for |
|---|---|---|
| `OutOfBlocksError` | `ValueError` | more blocks asked for than are free |
| `InvalidArgumentError` | `ValueError`, `AssertionError` | a number, range or name that cannot be meant |
| `GroupIdError` | `OverflowError`, as `InvalidArgumentError` | a group id that does not fit into a key |
| `InvalidTypeError` | `TypeError` | a value of the wrong type |
| `InvalidBlockError` | `ValueError`, `AssertionError`, `RuntimeError` | a block in a wrong state |
| `CorruptedPoolError` | `AssertionError`, `RuntimeError` | links or counters that contradict each other |
| `PoolTooLargeError` | `MemoryError`, as `InvalidArgumentError` | a pool too large for the memory |
| `PoolExhaustedError` | `MemoryError`, as `OutOfBlocksError` | an allocation that the adapter cannot serve |
| `PinnedBlockError` | as `InvalidBlockError` | freeing or moving a pinned block |
| `PinLimitError` | `ValueError` | more pinned blocks than the pool allows |
| `StaleLeaseError` | as `InvalidArgumentError` | a lease that has ended, or was never made here |
| `UnknownSequenceError` | as `InvalidArgumentError` | a sequence that holds no blocks |
| `EvictedSequenceError` | `MemoryError`, as `UnknownSequenceError` | a sequence evicted to make room |
| `FrozenSequenceError` | as `InvalidArgumentError` | a sequence that a migration has at the moment |
| `UnknownDeviceError` | as `InvalidArgumentError` | a device that the pool is not connected to |
| `CopyFailedError` | `RuntimeError` | bytes of blocks that did not all arrive |
| `PlanClosedError` | `RuntimeError` | a swap plan that was committed or aborted before |
| `LayoutMismatchError` | as `InvalidArgumentError` | blocks that mean something else elsewhere |
| `MigrationError` | `RuntimeError` | blocks that could not be migrated; the source still has them |
| `PeerUnavailableError` | `ConnectionError`, as `MigrationError` | a node that does not answer |
| `PeerAuthenticationError` | `PermissionError`, as above | a node that does not know the secret |
| `TransferFailedError` | as `MigrationError` | bytes that did not arrive, or not as they were sent |
| `StaleTransferError` | as `MigrationError` | a lease that has ended, or blocks that were taken anew |
| `InvalidContentError` | as `StaleTransferError` | content that was reported wrong while it was lent |
| `MigrationInDoubtError` | as `MigrationError` | a move that its source has not confirmed |
| `MigrationCancelledError` | as `MigrationError` | a migration that somebody cancelled |
| `TierError` | `OSError` | a tier's folder or file that cannot be used |
| `PoolDumpError` | `ValueError` | a dumped pool that cannot be loaded |
| `TraceError` | `ValueError` | a trace that cannot be read; says file and line |
| `WorkerLostError` | `RuntimeError` | a process of a sweep that ended before its replay did |
| `EventStreamError` | `ValueError` | bytes that are no event batch or no sequence |
| `EndpointError` | `OSError` | an address that cannot be bound or connected to |
| `PublisherClosedError` | `RuntimeError` | events for a publisher that was closed |
| `OutOfThreadsError` | `RuntimeError` | a thread that the system does not start |
| `MissingDependencyError` | `ImportError` | an optional package that is needed; says how to install it |
| `ControlError` | `RuntimeError` | a control socket that cannot be served, reached or understood |
| `DrawingError` | `ValueError` | a picture that cannot be drawn, or not be written |

vLLM v1 asserts in some of these places and raises RuntimeError in others; hence the several bases.
"""


class KVPoolError(Exception):
    """Base of all errors of this library."""


class OutOfBlocksError(KVPoolError, ValueError):
    """More blocks were asked for than are free. Nothing has changed."""


class InvalidArgumentError(KVPoolError, ValueError, AssertionError):
    """An argument that can not be meant, such as a negative count. Nothing has changed."""


class PoolTooLargeError(InvalidArgumentError, MemoryError):
    """A pool would need more memory than the machine has available. Nothing was allocated."""


class GroupIdError(InvalidArgumentError, OverflowError):
    """A KV cache group id that does not fit into 4 bytes unsigned. Nothing has changed."""


class InvalidTypeError(KVPoolError, TypeError):
    """An argument, or an element of one, has the wrong type. Nothing has changed."""


class InvalidBlockError(KVPoolError, ValueError, AssertionError, RuntimeError):
    """A block that is not in the state the call needs, or not in this pool. Nothing has changed."""


class PoolExhaustedError(OutOfBlocksError, MemoryError):
    """A request for blocks was refused; the message says what was tried. Nothing has changed."""


class PinnedBlockError(InvalidBlockError):
    """A pinned block is neither given back for good, nor moved. Nothing has changed."""


class PinLimitError(KVPoolError, ValueError):
    """More blocks would be pinned than the pool allows. Nothing has changed."""


class StaleLeaseError(InvalidArgumentError):
    """A lease that was given back, has run out, or is of another `BlockLeases`. Nothing has changed."""


class UnknownSequenceError(InvalidArgumentError):
    """A sequence that holds no blocks here: freed twice, evicted, or never seen. Nothing has changed."""


class EvictedSequenceError(UnknownSequenceError, MemoryError):
    """A sequence that lost its blocks to another; says to which. Its old block ids belong to others now."""


class FrozenSequenceError(InvalidArgumentError):
    """A sequence that is on its way to another node, or from one. Nothing has changed; try again later."""


class UnknownDeviceError(InvalidArgumentError):
    """A device that this pool is not on, or not connected to. Nothing has changed."""


class CorruptedPoolError(KVPoolError, AssertionError, RuntimeError):
    """The pool contradicts itself: a bug here, or links and counters written from outside."""


class CopyFailedError(KVPoolError, RuntimeError):
    """A copy of blocks broke off. Its sources are intact; its targets may hold anything.

    `__cause__` is what went wrong. Nobody relies on the targets' bytes before the copy has succeeded, so
    nothing is lost: keep the old block ids, and give the targets back or repeat the whole plan.
    """


class PlanClosedError(KVPoolError, RuntimeError):
    """A swap plan was committed or aborted before; each is closed once. Nothing has changed."""


class LayoutMismatchError(InvalidArgumentError):
    """Blocks here and there differ in what their bytes or hashes mean; says in what. Nothing was moved."""


class MigrationError(KVPoolError, RuntimeError):
    """Blocks were not migrated. The source still holds what it held; the target has kept nothing."""


class PeerUnavailableError(MigrationError, ConnectionError):
    """A node that is unknown, does not listen, has gone, or does not answer in time."""


class PeerAuthenticationError(PeerUnavailableError, PermissionError):
    """The other side does not know the shared secret, or has sent what it did not sign."""


class TransferFailedError(MigrationError):
    """The bytes of blocks did not arrive, or not as they were sent.

    Attributes:
        is_settled: nothing is written into the target's blocks any more; if not, they are quarantined.
    """

    def __init__(self, message: str, is_settled: bool = True) -> None:
        super().__init__(message)
        self.is_settled = is_settled


class StaleTransferError(MigrationError):
    """The lease of a transfer has ended, or a block was taken anew since it was named."""


class InvalidContentError(StaleTransferError):
    """The source reported content wrong while it was lent. The target has kept nothing of the transfer."""


class MigrationInDoubtError(MigrationError):
    """The blocks have arrived, but the source has not said that it gave them up: they may be in use there.

    The target keeps them aside until the source has answered.
    """


class MigrationCancelledError(MigrationError):
    """Somebody cancelled it. The source still holds the blocks."""


class TierError(KVPoolError, OSError):
    """A tier whose folder or file cannot be used: somebody has it open, another layout, a full disk."""


class PoolDumpError(KVPoolError, ValueError):
    """A file that is no dumped pool, is damaged, or does not fit this pool. The pool has not changed."""


class TraceError(KVPoolError, ValueError):
    """A trace that cannot be read. The message starts with `file:line:` where a line is at fault."""


class WorkerLostError(KVPoolError, RuntimeError):
    """A worker process ended before its work did: it was killed, perhaps for want of memory."""


class EventStreamError(KVPoolError, ValueError):
    """Bytes from an event stream that are not what they should be: no batch, no sequence, no event."""


class EndpointError(KVPoolError, OSError):
    """An address that cannot be bound or connected to, such as a port in use. Nothing was opened."""


class PublisherClosedError(KVPoolError, RuntimeError):
    """Events for a publisher that was closed. They were not sent."""


class OutOfThreadsError(KVPoolError, RuntimeError):
    """The system starts no more threads: a limit of processes or threads, or too little memory."""


def describe_install(extra: str) -> str:
    """Return the command that installs an optional part of kv_pool, for messages.

    kv_pool is on no package index yet, so it is installed from a checkout.
    """
    return f"pip install '.[{extra}]' in a checkout of kv_pool"


class MissingDependencyError(KVPoolError, ImportError):
    """An optional package is needed and not installed; the message says how to install it."""


class ControlError(KVPoolError, RuntimeError):
    """A control socket that cannot be served, reached or understood. The message says what to do."""


class DrawingError(KVPoolError, ValueError):
    """A picture that cannot be drawn or not be written; the message says what is missing."""
