"""Messages as bytes and back: msgpack, checked against the messages' types."""

from typing import Any, Union

import msgspec

from kv_pool.errors import InvalidArgumentError, MigrationError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.migration import messages
from kv_pool.migration.messages import Message

_ALL = tuple(kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message))
_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Union[tuple(kind for kind in _ALL if kind is not Message)])  # noqa: UP007


def encode_message(message: Message) -> bytes:
    """The bytes that `decode_message` reads.

    Raises:
        InvalidArgumentError: a field has no form on the wire, such as text with a lone surrogate.
    """
    try:
        return _encoder.encode(message)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"{type(message).__name__} can not be sent: {error}") from error


def decode_message(data: bytes) -> Message:
    """One of the classes of `messages`.

    Raises:
        MigrationError: it is none of them, or a field is not what it should be.
    """
    try:
        message = _decoder.decode(data)
    except UNDECODABLE as error:
        raise MigrationError(f"a message of {len(data)} bytes that is not understood: {error}") from error
    assert isinstance(message, Message)
    return message
