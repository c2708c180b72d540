"""`SourceCalls`: the calls of one pull to its source, until the pull is stopped."""

from __future__ import annotations

import threading
from typing import Protocol, TypeVar

from kv_pool.errors import MigrationError, PeerUnavailableError
from kv_pool.migration.messages import Message, NodeDescription
from kv_pool.migration.transfer_backend import BlockReader

_Reply = TypeVar("_Reply", bound=Message)
TRIES = 3
"""How often blocks are read, or a request is sent whose repetition is harmless, before it has failed."""
_PAUSE_S = 0.02


class PullPeer(Protocol):
    """The source, as a pull reaches it."""

    def call(self, message: Message) -> Message:
        """Ask it. Raises what it answers with, or PeerUnavailableError where it does not answer."""

    def take_reader(self, source: NodeDescription) -> BlockReader:
        """Connect, or use a connection that was left. Raises PeerUnavailableError, InvalidArgumentError."""

    def leave_reader(self, source: NodeDescription, reader: BlockReader) -> None:
        """The reader has nothing under way, and may be used by the next pull."""


class SourceCalls:
    """Asks the source of one pull. Another thread may stop the pull meanwhile."""

    def __init__(self, peer: PullPeer) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._is_too_late = False
        self._stopped_by: MigrationError | None = None
        self._woken = threading.Event()

    def stop(self, reason: MigrationError) -> bool:
        """Let `check_wanted` raise this from now on. False: it is too late to stop."""
        with self._lock:
            if self._is_too_late:
                return False
            if self._stopped_by is None:
                self._stopped_by = reason
        self._woken.set()
        return True

    def check_wanted(self) -> None:
        """Raise what the pull was stopped with."""
        if self._stopped_by is not None:
            raise self._stopped_by

    def refuse_stop(self) -> None:
        """From now on it is too late to stop."""
        with self._lock:
            self._is_too_late = True

    def commit(self) -> None:
        """As `refuse_stop`; raises what the pull was stopped with before."""
        with self._lock:
            self.check_wanted()
            self._is_too_late = True

    def wait(self, seconds: float) -> None:
        """Wait; not longer than until the pull is stopped."""
        self._woken.wait(seconds)

    def call(self, message: Message, reply_type: type[_Reply]) -> _Reply:
        """Ask once. Raises MigrationError where the reply is of another type."""
        reply = self.peer.call(message)
        if not isinstance(reply, reply_type):
            raise MigrationError(
                f"the source has answered {type(message).__name__} with {type(reply).__name__}"
            )
        return reply

    def repeat(self, message: Message, reply_type: type[_Reply]) -> _Reply:
        """Ask until there is an answer, a few times: a message may be lost, and none of these harms twice."""
        for num_left in reversed(range(TRIES)):
            try:
                return self.call(message, reply_type)
            except PeerUnavailableError:
                self.check_wanted()
                if not num_left:
                    raise
                # For a node that is being restarted, or a connection that was cut and is made again.
                self.wait(_PAUSE_S)
        raise AssertionError("the loop above returns or raises")
