"""`NodeCalls`: what a node can ask of another one; `LocalCalls`, where that is in the same process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kv_pool.errors import KVPoolError
from kv_pool.migration.call_failures import describe_failure, raise_failure
from kv_pool.migration.messages import CallFailed, Message

Answer = Callable[[Message, str], Message]
"""Answers a message of the node of this name, or raises. Called by several threads at once."""


class NodeCalls(Protocol):
    """Asks one node. Several threads may call at once."""

    def call(self, message: Message, timeout_s: float) -> Message:
        """The node's reply.

        Raises:
            PeerUnavailableError: no reply in time. The node may have done what was asked; whether to ask
                again is the caller's business.
            PeerAuthenticationError: it does not know the secret, or somebody else has meddled.
            KVPoolError: what the node raised, as what it was there; MigrationError if it was none of ours.
        """
        ...

    def close(self) -> None:
        """Ask no more; calls under way may fail."""
        ...


class LocalCalls:
    """A node of this process. The reply comes from the caller's own thread, so there is no waiting in vain.

    Args:
        answer: the node's.
        caller: the name of the node that asks.
    """

    def __init__(self, answer: Answer, caller: str) -> None:
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
