import pytest

from kv_pool.core.kv_events import AllBlocksCleared, BlockRemoved
from kv_pool.events.batch import KVEventBatch, encode_batch, encode_batch_positional, encode_in_pieces


@pytest.mark.parametrize("num_events", [0, 1, 15, 16, 300, 70_000])
@pytest.mark.parametrize("encode", [encode_batch, encode_batch_positional])
@pytest.mark.parametrize("rank", [0, 200])
def test_pieces_give_the_same_bytes_as_one_call(num_events, encode, rank):
    events = [BlockRemoved([number], "GPU") for number in range(num_events)]
    chunks = [events[first : first + 17] for first in range(0, num_events, 17)]
    payload, num_left_out = encode_in_pieces(2.5, chunks, rank, encode)
    assert payload == encode(KVEventBatch(2.5, events, rank))
    assert num_left_out == 0


def test_event_that_cannot_be_encoded_is_omitted_and_counted():
    good = [AllBlocksCleared(), BlockRemoved([1], None)]
    payload, num_left_out = encode_in_pieces(2.5, [[good[0]], [object(), good[1]], []], 0, encode_batch)
    assert payload == encode_batch(KVEventBatch(2.5, good, 0))
    assert num_left_out == 1
