"""Encoding of messages as msgpack, with type checks on decoding."""

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
    """Return the bytes that `decode_message` reads.

    Raises:
        InvalidArgumentError: a field cannot be encoded, such as text with a lone surrogate.
    """
    try:
        return _encoder.encode(message)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"cannot encode {type(message).__name__}: {error}") from error


def decode_message(data: bytes) -> Message:
    """Return an instance of one of the classes of `messages`.

    Raises:
        MigrationError: the message type is unknown, or a field has the wrong type.
    """
    try:
        message = _decoder.decode(data)
    except UNDECODABLE as error:
        raise MigrationError(f"cannot decode a message of {len(data)} bytes: {error}") from error
    assert isinstance(message, Message)
    return message
