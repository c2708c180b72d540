"""The first message over a connection, what it is for, and the reply: whether it may be."""

from typing import TypeVar

import msgspec

from kv_pool.errors import PeerAuthenticationError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.migration.call_failures import raise_failure
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import CallFailed

MAX_OPENING_BYTES = 4096

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the connection is for.

    Attributes:
        caller: the name of the node that has connected; what a node that knows the secret says of itself.
        backend: whose bulk data it is for; "" for messages and their replies.
    """

    caller: str
    backend: str = ""


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connection is ready, if nothing has failed."""

    failed: CallFailed | None = None


def open_channel(channel: Channel, opening: Opening, deadline: float) -> None:
    """Say what a new channel is for, and wait until the node has agreed.

    Raises:
        PeerUnavailableError, PeerAuthenticationError: no answer in time, or not the node's.
        MigrationError: the node does not agree; the channel is closed.
    """
    channel.send(msgspec.msgpack.encode(opening), deadline)
    opened = _decode(channel.receive(deadline, MAX_OPENING_BYTES), Opened)
    if opened.failed is not None:
        channel.close()
        raise_failure(opened.failed, channel.peer)


def receive_opening(channel: Channel, deadline: float) -> Opening:
    """What the peer wants the channel for. Raises PeerAuthenticationError if it does not say so properly."""
    return _decode(channel.receive(deadline, MAX_OPENING_BYTES), Opening)


def agree(channel: Channel, deadline: float, failed: CallFailed | None = None) -> None:
    """Answer an opening; with `failed`, that nothing comes of it."""
    channel.send(msgspec.msgpack.encode(Opened(failed)), deadline)


def _decode(data: bytes, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise PeerAuthenticationError(f"a connection that does not begin as it should: {error}") from error
