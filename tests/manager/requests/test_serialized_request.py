"""A request is restored from its bytes as it was; other bytes are refused."""

import random
from contextlib import suppress

import msgspec
import pytest
from damage import craft_or_damage

from kv_pool import BlockHasher, InvalidArgumentError, KVPoolError, Request, SaltRegion
from kv_pool.manager.requests.request import (
    LoRARequest,
    MultiModalFeature,
    PlaceholderRange,
    SerializedRequest,
    dump_request,
    load_request,
)

HASHER = BlockHasher("sha256", block_size=4)


def make_request():
    request = Request(
        "chat 7, turn 2",
        range(100, 110),
        HASHER,
        lora_request=LoRARequest(3, "polite", "/adapters/polite"),
        mm_features=[MultiModalFeature("a picture", PlaceholderRange(2, 3))],
        cache_salt="tenant",
        session_id="chat 7",
        salt_regions=[SaltRegion(6, "tenant 7"), SaltRegion(9, "user 3")],
    )
    request.append_output_token_ids([7, 8, 9])
    request.num_computed_tokens = 12
    return request


def test_a_loaded_request_continues_as_it_was_dumped():
    request = make_request()
    found = load_request(dump_request(request), HASHER)
    for there in (request, found):
        there.append_output_token_ids([1, 2, 3])
    assert {name: value for name, value in vars(found).items() if name != "_hasher"} == {
        name: value for name, value in vars(request).items() if name != "_hasher"
    }
    assert len(found.block_hashes) == 4


def test_a_request_without_regions_is_dumped_as_before():
    """A version without salt regions refuses unknown fields."""
    fields = msgspec.msgpack.decode(dump_request(Request("r", range(4), HASHER)))
    assert sorted(fields) == ["num_computed_tokens", "num_prompt_tokens", "request_id", "token_ids"]


@pytest.mark.parametrize("regions", [[[2, "a"]], [{"start": 2, "salt": ""}], [{"start": -1, "salt": "a"}]])
def test_impossible_regions_in_a_dump_are_refused(regions):
    fields = {**msgspec.msgpack.decode(dump_request(make_request())), "salt_regions": regions}
    with pytest.raises(InvalidArgumentError):
        load_request(msgspec.msgpack.encode(fields), HASHER)


@pytest.mark.parametrize(
    "state", [b"", b"\xc1", dump_request(make_request())[:-1], msgspec.msgpack.encode({})]
)
def test_other_bytes_are_refused(state):
    with pytest.raises(InvalidArgumentError, match="are not a request"):
        load_request(state, HASHER)


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt_tokens", "num_computed_tokens"), [(5, 0, 0), (5, 6, 0), (5, 5, 6), (5, 5, -1)]
)
def test_impossible_counts_are_refused(num_tokens, num_prompt_tokens, num_computed_tokens):
    state = SerializedRequest("r", [1] * num_tokens, num_prompt_tokens, num_computed_tokens)
    with pytest.raises(InvalidArgumentError, match="cannot have a prompt of"):
        load_request(msgspec.msgpack.encode(state), HASHER)


@pytest.mark.parametrize("seed", range(30))
def test_bytes_that_are_not_a_request_raise_typed_errors(seed):
    rng = random.Random(seed)
    hasher = BlockHasher("sha256", block_size=4)
    state = dump_request(make_request())
    for _ in range(60):
        with suppress(KVPoolError):
            dump_request(load_request(craft_or_damage(rng, state), hasher))


def test_a_request_that_cannot_be_serialized_is_refused():
    with pytest.raises(InvalidArgumentError, match="cannot be serialized"):
        dump_request(Request("\ud800", [1], BlockHasher("sha256", block_size=4)))
