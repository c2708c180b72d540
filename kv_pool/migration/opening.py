"""The opening: the first message over a connection, which states its purpose, and the reply."""

from typing import TypeVar

import msgspec

from kv_pool.errors import PeerAuthenticationError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import NodeName
from kv_pool.migration.call_failures import raise_failure
from kv_pool.migration.channel import Channel
from kv_pool.migration.messages import CallFailed

MAX_OPENING_BYTES = 4096

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The purpose of a connection.

    Attributes:
        caller: the name that the connecting node gives itself; it is authenticated by the secret only.
        backend: the backend whose bulk data the connection carries; "" for messages and replies.
    """

    caller: NodeName
    backend: str = ""


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reply to an opening: the connection is ready, unless `failed` is set."""

    failed: CallFailed | None = None


def open_channel(channel: Channel, opening: Opening, deadline: float) -> None:
    """Send the opening of a new channel and wait for the node's agreement.

    Raises:
        PeerUnavailableError: no answer in time.
        PeerAuthenticationError: the answer fails authentication.
        MigrationError: the node refuses. The channel is closed.
    """
    channel.send(msgspec.msgpack.encode(opening), deadline)
    opened = _decode(channel.receive(deadline, MAX_OPENING_BYTES), Opened)
    if opened.failed is not None:
        channel.close()
        raise_failure(opened.failed, channel.peer)


def receive_opening(channel: Channel, deadline: float) -> Opening:
    """Return the opening of a peer. Raises PeerAuthenticationError if it is malformed."""
    return _decode(channel.receive(deadline, MAX_OPENING_BYTES), Opening)


def agree(channel: Channel, deadline: float, failed: CallFailed | None = None) -> None:
    """Accept an opening, or refuse it with `failed`."""
    channel.send(msgspec.msgpack.encode(Opened(failed)), deadline)


def _decode(data: bytes, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except UNDECODABLE as error:
        raise PeerAuthenticationError(f"a connection has a malformed opening message: {error}") from error
