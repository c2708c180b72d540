import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_pool.core.token_packing import pack_cbor, pack_fixed

# Around every boundary at which an integer's CBOR encoding gets longer.
edges = st.sampled_from([0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1])
token_ids = st.lists(st.one_of(edges, st.integers(0, 2**64 - 1)), max_size=700)


@settings(deadline=None, max_examples=200)
@given(token_ids, st.sampled_from([1, 2, 16, 23, 24, 64, 255, 256, 300]))
def test_cbor_pieces_equal_those_of_a_cbor_library(tokens, block_size):
    expected = [
        cbor2.dumps(tokens[start : start + block_size], canonical=True)
        for start in range(0, len(tokens) - block_size + 1, block_size)
    ]
    assert pack_cbor(tokens, block_size) == expected


@settings(deadline=None, max_examples=100)
@given(token_ids, st.sampled_from([1, 2, 16, 300]))
def test_fixed_pieces_have_eight_bytes_per_token(tokens, block_size):
    pieces = pack_fixed(tokens, block_size)
    assert len(pieces) == len(tokens) // block_size
    unpacked = [
        int.from_bytes(piece[start : start + 8], "little")
        for piece in pieces
        for start in range(0, len(piece), 8)
    ]
    assert unpacked == tokens[: len(pieces) * block_size]


@pytest.mark.parametrize("pack", [pack_cbor, pack_fixed])
def test_long_and_short_prompts_pack_alike(pack):
    tokens = list(range(60_000, 70_000))
    assert pack(tokens, 16)[:4] == pack(tokens[:64], 16)
