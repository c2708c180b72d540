"""Calls between nodes: how a node of this process answers one, and how errors return to the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kv_pool.error_names import ERRORS_BY_NAME, find_error_name
from kv_pool.errors import MigrationError
from kv_pool.ids import NodeName
from kv_pool.migration.messages import CallFailed, Message

Answer = Callable[[Message, NodeName], Message]
"""Returns the reply to a message from the named node, or raises. Must be thread-safe."""


def call_local(answer: Answer, message: Message, caller: NodeName) -> Message:
    """Call a node of this process and return its reply. Raises the errors of `RemoteCalls.call`."""
    try:
        reply = answer(message, caller)
    except Exception as error:
        reply = describe_failure(error)
    return check_reply(reply, "a node of this process")


def describe_failure(error: Exception) -> CallFailed:
    """Return the reply for an error. Errors of other libraries become a MigrationError."""
    name = find_error_name(error)
    if name is None:
        return CallFailed("MigrationError", f"{type(error).__name__}: {error}")
    return CallFailed(name, str(error))


def check_reply(reply: Message, peer: str) -> Message:
    """Return a reply; raise the error of a `CallFailed`."""
    if isinstance(reply, CallFailed):
        raise_failure(reply, peer)
    return reply


def raise_failure(failed: CallFailed, peer: str) -> NoReturn:
    """Raise the error that a reply names; MigrationError if this version of kv_pool does not have it."""
    kind = ERRORS_BY_NAME.get(failed.error)
    if kind is None:
        raise MigrationError(f"{peer}: {failed.error}: {failed.message}")
    raise kind(failed.message)
