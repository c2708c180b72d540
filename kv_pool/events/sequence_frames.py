"""The frames of a message: sequence numbers, the end marker, live and replayed messages.

```text
live     topic | sequence | payload
request  identity | empty | first sequence requested            as received by a ROUTER
reply    identity | empty | topic | sequence | payload          for each batch
end      identity | empty | empty | ff ff ff ff ff ff ff ff | empty
```
"""

import struct

from kv_pool.errors import EventStreamError, InvalidArgumentError

END_OF_REPLAY = b"\xff" * 8
"""Replaces the sequence in the message that ends a replay."""

MAX_SEQUENCE = 2**64 - 2
"""The highest sequence of a batch; the next number is the end marker."""

_SEQUENCE = struct.Struct(">Q")


def pack_sequence(sequence: int) -> bytes:
    """Return a sequence as 8 bytes, big-endian. Raises InvalidArgumentError outside 0 to `MAX_SEQUENCE`."""
    if not 0 <= sequence <= MAX_SEQUENCE:
        raise InvalidArgumentError(f"sequence is {sequence}; it must be 0 to {MAX_SEQUENCE}")
    return _SEQUENCE.pack(sequence)


def unpack_sequence(frame: bytes) -> int:
    """Return the number in a sequence frame; 2**64 - 1 is the end marker.

    Raises:
        EventStreamError: the frame is not 8 bytes long.
    """
    if len(frame) != _SEQUENCE.size:
        raise EventStreamError(f"a sequence frame has {len(frame)} bytes; it must have {_SEQUENCE.size}")
    number: int = _SEQUENCE.unpack(frame)[0]
    return number
