"""Messages as bytes and back: msgpack, checked against the messages' types."""

from typing import Any, Union

import msgspec

from kv_pool.errors import MigrationError
from kv_pool.migration import messages
from kv_pool.migration.messages import Message

_ALL = tuple(kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message))
_encoder = msgspec.msgpack.Encoder()
_decoder: Any = msgspec.msgpack.Decoder(Union[tuple(kind for kind in _ALL if kind is not Message)])  # noqa: UP007


def encode_message(message: Message) -> bytes:
    """The bytes that `decode_message` reads."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """One of the classes of `messages`.

    Raises:
        MigrationError: it is none of them, or a field is not what it should be.
    """
    try:
        message = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MigrationError(f"a message of {len(data)} bytes that is not understood: {error}") from error
    assert isinstance(message, Message)
    return message
