"""`NodeCalls`: calls to another node, and how its errors return; `LocalCalls`: to a node of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import KVPoolError, MigrationError
from kv_pool.ids import NodeName
from kv_pool.migration.messages import CallFailed, Message

Answer = Callable[[Message, NodeName], Message]
"""Returns the reply to a message from the named node, or raises. Must be thread-safe."""


class NodeCalls(Protocol):
    """Calls to one node. Thread-safe."""

    def call(self, message: Message, timeout_s: float) -> Message:
        """Send a message and return the node's reply.

        Raises:
            PeerUnavailableError: no reply in time. The node may have executed the request; the caller decides
                whether to repeat it.
            PeerAuthenticationError: the node does not know the secret, or a message was altered.
            KVPoolError: the error that the node raised, with its type; MigrationError for errors of other
                libraries.
        """
        ...

    def close(self) -> None:
        """Close the connections; calls in progress may fail."""
        ...


class LocalCalls:
    """Calls to a node of this process. The caller's thread computes the reply, so `timeout_s` has no effect.

    Args:
        answer: of the called node.
        caller: the name of the calling node.
    """

    def __init__(self, answer: Answer, caller: NodeName) -> None:
        self._answer = answer
        self._caller = caller

    def call(self, message: Message, timeout_s: float) -> Message:
        try:
            reply = self._answer(message, self._caller)
        except KVPoolError:
            raise
        except Exception as error:
            raise_failure(describe_failure(error), "a node of this process")
        if isinstance(reply, CallFailed):
            raise_failure(reply, "a node of this process")
        return reply

    def close(self) -> None:
        pass


def describe_failure(error: Exception) -> CallFailed:
    """Return the reply for an error. Errors of other libraries become a MigrationError."""
    name = find_error_name(error)
    if name is None:
        return CallFailed("MigrationError", f"{type(error).__name__}: {error}")
    return CallFailed(name, str(error))


def raise_failure(failed: CallFailed, peer: str) -> NoReturn:
    """Raise the error that a reply names; MigrationError if this version of kv_pool does not have it."""
    kind = ERRORS_BY_NAME.get(failed.error)
    if kind is None:
        raise MigrationError(f"{peer}: {failed.error}: {failed.message}")
    raise kind(failed.message)
