"""The errors that kv_pool raises.

Every error is a `KVPoolError`. In brackets: the built-in errors that it also is, because callers of vLLM v1
catch them in that situation; `except ValueError` works as before. On the right: what raises it.

    KVPoolError
    ├── OutOfBlocksError (ValueError)                       a request for more blocks than are free
    │   └── PoolExhaustedError (MemoryError)                an allocation that the adapter cannot serve
    ├── InvalidArgumentError (ValueError, AssertionError)   a number, range or name that is not valid
    │   ├── GroupIdError (OverflowError)                    a group id that does not fit into a key
    │   ├── PoolTooLargeError (MemoryError)                 a pool too large for the memory
    │   ├── StaleLeaseError                                 a lease that has ended or is not this pool's
    │   ├── UnknownSequenceError                            a sequence that has no blocks
    │   │   └── EvictedSequenceError (MemoryError)          a sequence that was evicted
    │   ├── FrozenSequenceError                             a sequence that is being migrated
    │   ├── UnknownDeviceError                              a device that the pool is not connected to
    │   └── LayoutMismatchError                             blocks whose bytes or hashes differ in meaning
    ├── InvalidTypeError (TypeError)                        a value of the wrong type
    ├── InvalidBlockError (ValueError, AssertionError, RuntimeError)  a block in the wrong state
    │   └── PinnedBlockError                                freeing or moving a pinned block
    ├── CorruptedPoolError (AssertionError, RuntimeError)   links or counters that contradict each other
    ├── PoolInterruptedError (RuntimeError)                 a pool whose last call was interrupted: repair it
    ├── PinLimitError (ValueError)                          more pinned blocks than the pool allows
    ├── CachePolicyError (RuntimeError)                     a cache policy that is broken; the pool is intact
    ├── CopyFailedError (RuntimeError)                      a copy of blocks that did not complete
    ├── ForkedPoolError (RuntimeError)                      a copy of a pool made by fork() during a call
    ├── PlanClosedError (RuntimeError)                      a swap plan that is committed or aborted
    ├── MigrationError (RuntimeError)                       blocks not migrated; the source still has them
    │   ├── PeerUnavailableError (ConnectionError)          a node that does not answer
    │   │   └── PeerAuthenticationError (PermissionError)   a node that does not know the secret
    │   ├── TransferFailedError                             bytes that were lost or damaged
    │   ├── StaleTransferError                              an ended lease, or blocks that were reused
    │   │   └── InvalidContentError                         content that the source invalidated
    │   ├── MigrationInDoubtError                           a move that its source has not confirmed
    │   └── MigrationCancelledError                         a migration that was cancelled
    ├── TierError (OSError)                                 a tier's folder or file that cannot be used
    ├── PoolDumpError (ValueError)                          a pool dump that cannot be loaded
    ├── TraceError (ValueError)                             an unreadable trace; names file and line
    ├── WorkerLostError (RuntimeError)                      a worker process of replays that ended early
    ├── EventStreamError (ValueError)                       bytes that are no event batch or number
    ├── EndpointError (OSError)                             an address that cannot be used
    ├── PublisherClosedError (RuntimeError)                 events for a publisher that is closed
    ├── OutOfThreadsError (RuntimeError)                    a thread that the system cannot start
    ├── MissingDependencyError (ImportError)                an optional package that is not installed
    ├── ControlError (RuntimeError)                         a control socket that does not work
    └── DrawingError (ValueError)                           a picture that cannot be drawn or written

Some errors have several bases because vLLM v1 asserts in some of these situations and raises RuntimeError in
others.
"""

from collections.abc import Iterable


class KVPoolError(Exception):
    """Base class of all errors of this library."""


class OutOfBlocksError(KVPoolError, ValueError):
    """More blocks were requested than are free. Nothing has changed."""


class InvalidArgumentError(KVPoolError, ValueError, AssertionError):
    """An argument is not valid, such as a negative count. Nothing has changed."""


class PoolTooLargeError(InvalidArgumentError, MemoryError):
    """The pool would need more memory than is available. Nothing was allocated."""


class GroupIdError(InvalidArgumentError, OverflowError):
    """A KV cache group id does not fit into 4 unsigned bytes. Nothing has changed."""


class InvalidTypeError(KVPoolError, TypeError):
    """An argument, or an element of one, has the wrong type. Nothing has changed."""


class InvalidBlockError(KVPoolError, ValueError, AssertionError, RuntimeError):
    """A block is not in the state that the call needs, or not in this pool. Nothing has changed."""


class PoolExhaustedError(OutOfBlocksError, MemoryError):
    """An allocation was refused. The message says what the pool has tried. Nothing has changed."""


class PinnedBlockError(InvalidBlockError):
    """A pinned block cannot be freed or moved. Nothing has changed."""


class PinLimitError(KVPoolError, ValueError):
    """More blocks would be pinned than the pool allows. Nothing has changed."""


class StaleLeaseError(InvalidArgumentError):
    """A lease was released, has expired, or belongs to another `BlockLeases`. Nothing has changed."""


class UnknownSequenceError(InvalidArgumentError):
    """A sequence has no blocks here: it was freed, evicted, or never allocated. Nothing has changed."""


class EvictedSequenceError(UnknownSequenceError, MemoryError):
    """A sequence was evicted. The message names the sequence that needed the blocks.

    The old block ids may belong to other sequences now.
    """


class FrozenSequenceError(InvalidArgumentError):
    """A sequence is being migrated to or from another node. Nothing has changed; try again later."""


class UnknownDeviceError(InvalidArgumentError):
    """The pool is not on this device and not connected to it. Nothing has changed."""


class CorruptedPoolError(KVPoolError, AssertionError, RuntimeError):
    """The state of the pool is inconsistent: a bug, or other code has changed its links or counters."""


class PoolInterruptedError(KVPoolError, RuntimeError):
    """An earlier call of this pool was interrupted, such as by a signal handler that raised. Repair the pool.

    `repair()` of the manager or of the adapter keeps the blocks of every request and sequence, frees all
    others, and empties the prefix cache; `BlockPool.repair` takes the blocks that its caller holds.
    """


class CachePolicyError(KVPoolError, RuntimeError):
    """A cache policy raised, named a queue that it does not have, or lost a run. The message names it.

    The pool is intact and goes on with LRU: it logs the error, and keeps it as `policy_host.failure`. A
    replay raises it. `__cause__` is the policy's exception, if any.
    """


class CopyFailedError(KVPoolError, RuntimeError):
    """A copy of blocks failed part-way. Its sources are intact; its targets hold undefined bytes.

    `__cause__` is the original error. No content is lost, because targets are used only after a successful
    copy: keep the old block ids, and free the targets or repeat the whole plan.
    """


class ForkedPoolError(KVPoolError, RuntimeError):
    """The process was forked while another thread was in a call of the pool."""


class PlanClosedError(KVPoolError, RuntimeError):
    """A swap plan is already committed or aborted. Nothing has changed."""


class LayoutMismatchError(InvalidArgumentError):
    """The blocks of two pools differ in layout or hashing. The message lists the differences.

    Nothing was moved.
    """


class MigrationError(KVPoolError, RuntimeError):
    """Blocks were not migrated. The source still has them; the target has kept nothing."""


class PeerUnavailableError(MigrationError, ConnectionError):
    """A node is unknown, does not listen, has disconnected, or does not answer in time."""


class PeerAuthenticationError(PeerUnavailableError, PermissionError):
    """The peer does not know the shared secret, or has sent an unsigned message."""


class TransferFailedError(MigrationError):
    """The bytes of blocks did not arrive, or arrived damaged."""


class StaleTransferError(MigrationError):
    """The lease of a transfer has ended, or one of its blocks has been reused."""


class InvalidContentError(StaleTransferError):
    """The source invalidated the content during the transfer. The target has kept nothing of it."""


class MigrationInDoubtError(MigrationError):
    """The blocks have arrived, but the source has not confirmed their release and may still use them.

    The target keeps them unused until the source answers. It also does so until its pool is repaired, if a
    call of it was interrupted.
    """


class MigrationCancelledError(MigrationError):
    """The migration was cancelled. The source still has the blocks."""


class TierError(KVPoolError, OSError):
    """A tier's folder or file cannot be used: open in another process, another layout, or disk full."""


class PoolDumpError(KVPoolError, ValueError):
    """A file is not a pool dump, is damaged, or does not fit this pool. The pool has not changed."""


class TraceError(KVPoolError, ValueError):
    """A trace cannot be read. The message starts with `file:line:` if a line is invalid."""


class WorkerLostError(KVPoolError, RuntimeError):
    """A worker process ended before its work was done, or a cluster of workers does not answer.

    The process may have been killed for lack of memory.
    """


class EventStreamError(KVPoolError, ValueError):
    """Bytes of an event stream are not a valid batch, sequence number or event."""


class EndpointError(KVPoolError, OSError):
    """A socket cannot be opened, bound or connected, such as at a port in use. Nothing was opened."""


class PublisherClosedError(KVPoolError, RuntimeError):
    """Events were passed to a closed publisher. They were not sent."""


class OutOfThreadsError(KVPoolError, RuntimeError):
    """The system cannot start another thread: a limit on threads or processes, or too little memory."""


def describe_install(extra: str) -> str:
    """Return the command that installs an extra of kv_pool, for messages.

    kv_pool is not on a package index yet, so it is installed from a checkout.
    """
    return f"pip install '.[{extra}]' in a checkout of kv_pool"


def describe_known(name: str, known: Iterable[str], are: str = "known are") -> str:
    """Return the known names, the one first that a wrong name may stand for, as the end of a message."""
    import difflib  # when it is needed: most programs name nothing wrong

    names = list(known)
    begun = [one for one in names if name and one.startswith(name.lower())]
    meant = begun or difflib.get_close_matches(name.lower(), names, 1)
    asked = f"did you mean {meant[0]!r}? " if meant else ""
    return f"{asked}{are} {', '.join(names)}"


class MissingDependencyError(KVPoolError, ImportError):
    """An optional package is not installed. The message says how to install it."""


class ControlError(KVPoolError, RuntimeError):
    """A control socket cannot be served, reached or understood. The message says what to do."""


class DrawingError(KVPoolError, ValueError):
    """A picture cannot be drawn or written. The message gives the reason."""
