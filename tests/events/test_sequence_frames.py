import pytest

from kv_pool.errors import EventStreamError, InvalidArgumentError
from kv_pool.events.batch import (
    MAX_SEQUENCE,
    pack_sequence,
    unpack_sequence,
)


@pytest.mark.parametrize(
    ("sequence", "frame"),
    [(0, "0000000000000000"), (258, "0000000000000102"), (MAX_SEQUENCE, "fffffffffffffffe")],
)
def test_sequence_is_8_bytes_big_endian(sequence, frame):
    assert pack_sequence(sequence).hex() == frame
    assert unpack_sequence(bytes.fromhex(frame)) == sequence


@pytest.mark.parametrize("sequence", [-1, MAX_SEQUENCE + 1])
def test_end_marker_is_not_a_valid_sequence(sequence):
    with pytest.raises(InvalidArgumentError, match=f"sequence is {sequence}"):
        pack_sequence(sequence)


@pytest.mark.parametrize("frame", [b"", b"\x00" * 7, b"\x00" * 9])
def test_frame_of_another_length_is_rejected(frame):
    with pytest.raises(EventStreamError, match=f"has {len(frame)} bytes"):
        unpack_sequence(frame)
