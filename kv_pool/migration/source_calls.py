"""`SourceCalls`: the calls of one pull to its source, with a stop flag."""

from __future__ import annotations

import threading
from typing import Protocol, TypeVar

from kv_pool.errors import MigrationError, PeerUnavailableError
from kv_pool.migration.messages import Message, NodeDescription
from kv_pool.migration.transfer_backend import BlockReader

_Reply = TypeVar("_Reply", bound=Message)
TRIES = 3
"""Maximum number of attempts for a read of blocks or an idempotent request."""
_PAUSE_S = 0.02


class PullPeer(Protocol):
    """The connection of a pull to its source."""

    def call(self, message: Message) -> Message:
        """Send a message and return the reply. Raises the source's error, or PeerUnavailableError."""

    def take_reader(self, source: NodeDescription) -> BlockReader:
        """Return an idle reader or a new one. Raises PeerUnavailableError, InvalidArgumentError."""

    def return_reader(self, source: NodeDescription, reader: BlockReader) -> None:
        """Return an idle reader for use by the next pull."""


class SourceCalls:
    """The calls of one pull to its source. Another thread may stop the pull."""

    def __init__(self, peer: PullPeer) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._is_too_late = False
        self._stopped_by: MigrationError | None = None
        self._woken = threading.Event()

    def stop(self, reason: MigrationError) -> bool:
        """Make `check_wanted` raise `reason` from now on. Return False if it is too late to stop."""
        with self._lock:
            if self._is_too_late:
                return False
            if self._stopped_by is None:
                self._stopped_by = reason
        self._woken.set()
        return True

    def check_wanted(self) -> None:
        """Raise the reason for which the pull was stopped, if any."""
        if self._stopped_by is not None:
            raise self._stopped_by

    def refuse_stop(self) -> None:
        """Refuse `stop` from now on."""
        with self._lock:
            self._is_too_late = True

    def commit(self) -> None:
        """Refuse `stop` from now on; raise the reason if the pull was already stopped."""
        with self._lock:
            self.check_wanted()
            self._is_too_late = True

    def wait(self, seconds: float) -> None:
        """Wait for `seconds` or until the pull is stopped."""
        self._woken.wait(seconds)

    def call(self, message: Message, reply_type: type[_Reply]) -> _Reply:
        """Send a message once. Raises MigrationError if the reply has another type."""
        reply = self.peer.call(message)
        if not isinstance(reply, reply_type):
            raise MigrationError(f"the source answered {type(message).__name__} with {type(reply).__name__}")
        return reply

    def repeat(self, message: Message, reply_type: type[_Reply]) -> _Reply:
        """Send an idempotent message, and repeat it up to `TRIES` times in all until there is an answer."""
        for num_left in reversed(range(TRIES)):
            try:
                return self.call(message, reply_type)
            except PeerUnavailableError:
                self.check_wanted()
                if not num_left:
                    raise
                # Time for a restarting node, or for a broken connection to be replaced.
                self.wait(_PAUSE_S)
        raise AssertionError("the loop above returns or raises")
