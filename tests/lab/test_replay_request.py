"""Tests of `ReplayRequest`: blocks, hashes and conventions."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_pool import BlockHasher, InvalidArgumentError
from kv_pool.events.publisher_blocks import to_wire_hash
from kv_pool.lab.replay_request import (
    CONVENTIONS,
    ReplayRequest,
    hash_ids_to_block_hashes,
)
from kv_pool.lab.trace import TraceRequest

SIZES = st.integers(1, 12)


def count_shared(first, second):
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def expand(hash_ids, trace_block_size, num_tokens):
    """Return token ids of a prompt; two prompts have equal tokens exactly where their hash ids agree."""
    tokens = [(hash_id, place) for hash_id in hash_ids for place in range(trace_block_size)]
    return tokens[:num_tokens]


@given(SIZES, SIZES, st.integers(0, 6), st.data())
def test_shared_prefixes_share_block_hashes(trace_block_size, block_size, num_common, data):
    common = list(range(num_common))
    prompts = []
    for first_id in (100, 200):
        ids = common + list(range(first_id, first_id + data.draw(st.integers(0, 4))))
        end = len(ids) * trace_block_size
        # Up to one block fewer (the last id is partial) or more (the partial block has no id).
        num_tokens = max(0, end + data.draw(st.integers(1 - trace_block_size, trace_block_size - 1)))
        prompts.append((ids, num_tokens))
    hashes = [
        hash_ids_to_block_hashes(ids, trace_block_size, num_tokens, block_size) for ids, num_tokens in prompts
    ]
    tokens = [expand(ids, trace_block_size, num_tokens) for ids, num_tokens in prompts]
    assert count_shared(*hashes) == count_shared(*tokens) // block_size
    for prompt_hashes, prompt_tokens in zip(hashes, tokens, strict=True):
        assert len(prompt_hashes) == len(prompt_tokens) // block_size
        assert len(set(prompt_hashes)) == len(prompt_hashes)


def test_no_block_hash_is_shared_after_a_difference():
    first = hash_ids_to_block_hashes([1, 2, 3, 4], 8, 32, 6)
    second = hash_ids_to_block_hashes([1, 7, 8, 9], 8, 32, 6)
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


@pytest.mark.parametrize(
    ("convention", "num_tokens", "num_cacheable_blocks", "max_hit_tokens"),
    [
        ("full_blocks_cap", 20, 2, 19),
        ("full_blocks", 20, 2, 20),
        ("ids_as_blocks_cap", 24, 3, 19),
        ("ids_as_blocks", 24, 3, 24),
    ],
)
def test_conventions_for_partial_blocks_with_ids(
    convention, num_tokens, num_cacheable_blocks, max_hit_tokens
):
    request = ReplayRequest.from_trace(TraceRequest(1, 0.0, 20, 0, [1, 2, 3], None), 8, convention, 8)
    assert request.input_length == 20
    assert request.num_tokens == request.num_prompt_tokens == num_tokens
    assert request.num_cacheable_blocks == num_cacheable_blocks
    assert request.max_hit_tokens == max_hit_tokens


@pytest.mark.parametrize(
    ("convention", "num_tokens"),
    [("full_blocks_cap", 20), ("full_blocks", 20), ("ids_as_blocks_cap", 16), ("ids_as_blocks", 16)],
)
def test_conventions_for_partial_blocks_without_ids(convention, num_tokens):
    request = ReplayRequest.from_trace(TraceRequest(1, 0.0, 20, 0, [1, 2], None), 8, convention, 8)
    assert request.num_tokens == num_tokens
    assert request.num_cacheable_blocks == 2


def test_token_ids_are_hashed_as_in_an_engine():
    hasher = BlockHasher("xxh3_128", "0", 4)
    tokens = list(range(10))
    request = ReplayRequest.from_trace(TraceRequest(3, 5.0, 10, 2, None, tokens), 4, hasher=hasher)
    assert request.block_hashes == hasher.hash_blocks(tokens)
    assert request.num_cacheable_blocks == 2
    assert request.all_token_ids == tokens
    assert (request.request_id, request.arrival_ms, request.num_output_left) == ("3", 5.0, 2)


@pytest.mark.parametrize("block_size", [4, 8])
def test_generated_blocks_have_unique_hashes(block_size):
    requests = [
        ReplayRequest.from_trace(
            TraceRequest(line, 0.0, 20, 30, [1, 2, 3], None), block_size, trace_block_size=8
        )
        for line in (1, 2)
    ]
    num_prompt_hashes = 20 // block_size
    for request in requests:
        request.append_output(9)
        request.append_output(21)
        assert request.num_tokens == 50
        assert request.num_output_left == 0
        assert len(request.block_hashes) == 50 // block_size
        assert request.num_cacheable_blocks == num_prompt_hashes
    first, second = (request.block_hashes for request in requests)
    assert first[:num_prompt_hashes] == second[:num_prompt_hashes]
    assert len(set(first[num_prompt_hashes:] + second)) == 2 * len(first) - num_prompt_hashes


@pytest.mark.parametrize("block_size", [4, 8, 16])
def test_distinct_hashes_are_distinct_on_the_wire(block_size):
    """Events carry 8 bytes of a hash; once these were equal for all blocks of a trace."""
    hashes = set()
    for line in range(1, 30):
        ids = [1, 2, 1 << 33, *range(100 * line, 100 * line + 20)]
        request = ReplayRequest.from_trace(
            TraceRequest(line, 0.0, 184, 64, ids, None), block_size, trace_block_size=8
        )
        request.append_output(64)
        hashes.update(request.block_hashes)
    assert len({to_wire_hash(block_hash) for block_hash in hashes}) == len(hashes) > 300


def test_token_ids_repeat_hash_ids_then_zeros():
    request = ReplayRequest.from_trace(TraceRequest(1, 0.0, 10, 5, [7, 9], None), 8, trace_block_size=8)
    assert request.all_token_ids == [7] * 8 + [9] * 2
    request.append_output(3)
    assert request.all_token_ids == [7] * 8 + [9] * 2 + [0] * 3


def test_unknown_convention_error_lists_conventions():
    with pytest.raises(InvalidArgumentError, match=f"'papers'; known are {', '.join(CONVENTIONS)}"):
        ReplayRequest.from_trace(TraceRequest(1, 0.0, 8, 0, [1], None), 8, "papers", 8)


def test_hash_ids_need_the_block_size_of_the_trace():
    with pytest.raises(InvalidArgumentError, match="needs the trace's block size"):
        ReplayRequest.from_trace(TraceRequest(1, 0.0, 8, 0, [1], None), 8)


def test_token_ids_need_a_hasher():
    with pytest.raises(InvalidArgumentError, match="needs a BlockHasher"):
        ReplayRequest.from_trace(TraceRequest(1, 0.0, 2, 0, None, [1, 2]), 8)


def make_request(hash_ids, input_length, output_length, block_size=8):
    traced = TraceRequest(
        line=7,
        arrival_ms=12.5,
        input_length=input_length,
        output_length=output_length,
        hash_ids=hash_ids,
        token_ids=None,
        session_id="a",
    )
    return ReplayRequest.from_trace(traced, block_size, trace_block_size=8)


def test_block_hash_is_known_before_the_block_is_full():
    request = make_request([1, 2, 3], 20, 40)
    names = [request.name_block(index) for index in range(7)]
    assert len(set(names)) == 7
    for _ in range(5):
        request.append_output(8)
        assert request.block_hashes == names[: len(request.block_hashes)]
    assert len(request.block_hashes) == 7


def test_restored_request_continues_identically():
    request = make_request([1, 2, 3], 20, 40)
    request.append_output(10)
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ReplayRequest)
    for both in (request, there):
        both.append_output(20)
    for name in ReplayRequest.__struct_fields__:
        assert getattr(there, name) == getattr(request, name), name
    assert there.all_token_ids == request.all_token_ids
