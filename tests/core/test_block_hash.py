import hashlib
import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import xxhash
from cbor2 import CBORTag
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_pool import (
    BlockHasher,
    InvalidArgumentError,
    InvalidTypeError,
    LoRARequest,
    MultiModalFeature,
    PlaceholderRange,
    Request,
)
from kv_pool.core.block_hash import HASH_ALGORITHMS

GOLDEN = json.loads((Path(__file__).parent / "data" / "vllm_block_hashes.json").read_text())


@pytest.mark.parametrize("made", GOLDEN["made"], ids=lambda made: f"seed={made['seed']}")
def test_sha256_cbor_is_byte_identical_to_vllm(made):
    """The vectors and their recipe are in tests/core/data/."""
    assert GOLDEN["vllm"].startswith("0.33.0")
    assert len(GOLDEN["cases"]) == len(made["hashes"]) == 62
    for case, expected in zip(GOLDEN["cases"], made["hashes"], strict=True):
        lookahead = case.get("num_lookahead", 0)
        hasher = BlockHasher("sha256_cbor", made["seed"], case["block_size"], lookahead)
        assert hasher.root.hex() == made["root"]
        lora = case.get("lora")
        request = Request(
            "r",
            case["tokens"],
            hasher,
            lora_request=lora and LoRARequest(lora["adapter_id"], lora["name"], lora["path"]),
            mm_features=[
                MultiModalFeature(name, PlaceholderRange(offset, length))
                for name, offset, length in case.get("mm_features", [])
            ],
            cache_salt=case.get("cache_salt"),
        )
        assert [found.hex() for found in request.block_hashes] == expected


def test_xxh3_and_sha256_hash_parent_and_packed_tokens():
    tokens = [5, 2**64 - 1]
    packed = b"".join(token.to_bytes(8, "little") for token in tokens)
    sha = BlockHasher("sha256", "s", 2)
    assert sha.hash_blocks(tokens) == [hashlib.sha256(sha.root + packed).digest()]
    xxh = BlockHasher("xxh3_128", "s", 2)
    seed = int.from_bytes(hashlib.sha256(b"kv_pool xxh3_128 s").digest()[16:24], "big")
    assert xxh.hash_blocks(tokens) == [xxhash.xxh3_128_digest(xxh.root + packed, seed)]


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
class TestEveryAlgorithm:
    def test_a_hash_covers_everything_before_it(self, algorithm):
        hasher = BlockHasher(algorithm, "s", 4)
        one = hasher.hash_blocks(range(16))
        other = hasher.hash_blocks([*range(8), 99, *range(9, 16)])
        assert len(one) == len(other) == 4
        assert one[:2] == other[:2]
        assert one[2] != other[2]
        assert one[3] != other[3]

    def test_different_extra_keys_give_different_hashes(self, algorithm):
        hasher = BlockHasher(algorithm, "s", 2)
        keys = [(("lora", "a", "/a"),), (("lora", "a", "/b"),), (("cache_salt", "a"),), None]
        found = {hasher.hash_blocks([1, 2], None, [key])[0] for key in keys}
        assert len(found) == 4
        assert hasher.hash_blocks([1, 2]) == hasher.hash_blocks([1, 2], None, [None])

    def test_any_sequence_of_ints_is_accepted(self, algorithm):
        hasher = BlockHasher(algorithm, "s", 4)
        expected = hasher.hash_blocks([7, 300, 70_000, 2**40])
        assert hasher.hash_blocks((7, 300, 70_000, 2**40)) == expected
        assert hasher.hash_blocks(np.array([7, 300, 70_000, 2**40])) == expected
        assert hasher.hash_blocks(np.array([7, 300, 70_000, 2**40], dtype=np.uint64)) == expected

    @pytest.mark.parametrize("num_before", [0, 500])
    @pytest.mark.parametrize("wrong", [-1, 2**64])
    def test_a_token_out_of_range_is_named(self, algorithm, wrong, num_before):
        hasher = BlockHasher(algorithm, "s", 4)
        with pytest.raises(InvalidArgumentError, match=f"token {num_before} is {wrong};"):
            hasher.hash_blocks([1] * num_before + [wrong, 1, 1, 1])

    @pytest.mark.parametrize("wrong", [1.0, "1", None])
    def test_a_token_that_is_not_an_int_is_named(self, algorithm, wrong):
        hasher = BlockHasher(algorithm, "s", 4)
        with pytest.raises(InvalidTypeError, match=rf"token_ids\[1\] is of type {type(wrong).__name__}"):
            hasher.hash_blocks([1, wrong, 1, 1])

    def test_a_parent_of_the_wrong_length_is_refused(self, algorithm):
        hasher = BlockHasher(algorithm, "s", 4)
        with pytest.raises(InvalidArgumentError, match=f"hashes have {hasher.digest_size}"):
            hasher.hash_blocks(range(4), b"short")


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_hashers_of_one_process_hash_alike_without_options(algorithm):
    """A bug: each `xxh3_128` hasher had its own seed, so two of them never shared blocks."""
    one, other = BlockHasher(algorithm, block_size=4), BlockHasher(algorithm, block_size=4)
    assert one.hash_blocks(range(8)) == other.hash_blocks(range(8))


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_only_xxh3_has_a_random_default_seed_per_process(algorithm):
    code = f"from kv_pool import BlockHasher; print(BlockHasher({algorithm!r}).root.hex())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    alike = told.stdout.strip() == BlockHasher(algorithm).root.hex()
    assert alike == (algorithm != "xxh3_128")


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_text_that_cannot_be_encoded_is_a_typed_error(algorithm):
    hasher = BlockHasher(algorithm, "s", 4)
    lone = "a\ud800b"
    image = MultiModalFeature(lone, PlaceholderRange(0, 3))
    for options in (
        {"cache_salt": lone},
        {"lora_request": LoRARequest(1, lone, "p")},
        {"lora_request": LoRARequest(1, "n", lone)},
        {"mm_features": [image]},
    ):
        with pytest.raises(InvalidArgumentError, match="surrogates not allowed"):
            Request("r", range(8), hasher, **options)
    with pytest.raises(InvalidArgumentError, match="surrogates not allowed"):
        BlockHasher(algorithm, lone)
    with pytest.raises(InvalidTypeError, match="cannot be hashed"):
        hasher.hash_blocks(range(8), extra_keys=[(object(),)])


def nest(container, depth):
    inner = 0
    for _ in range(depth):
        inner = container(inner)
    return inner


CONTAINERS = {
    "tuple": lambda inner: (inner,),
    "list": lambda inner: [inner],
    "dict": lambda inner: {"a": inner},
    "frozenset": lambda inner: frozenset([inner]),
    "deque": lambda inner: deque([inner]),
    "proxy": lambda inner: MappingProxyType({1: inner}),
    "tag": lambda inner: CBORTag(1000, inner),
    "several": lambda inner: (1, [inner, inner], {"b": inner}),
}


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_deeply_nested_extra_keys_are_a_typed_error(algorithm, name):
    """A bug: the CBOR encoder ran out of stack, and the process crashed or raised RecursionError."""
    depth = 100_000 if name in ("tuple", "list", "dict") else 100  # more would crash Python itself
    hasher = BlockHasher(algorithm, "s", 4)
    keys = nest(CONTAINERS[name], depth)
    with pytest.raises(InvalidArgumentError, match=r"nested more than 32 deep"):
        hasher.hash_blocks(range(8), extra_keys=[(("mm", keys, 0),)])
    with pytest.raises(InvalidArgumentError, match=r"nested more than 32 deep"):
        Request("r", range(8), hasher, mm_features=[MultiModalFeature(keys, PlaceholderRange(0, 4))])


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_size_below_one_is_refused(block_size):
    with pytest.raises(InvalidArgumentError, match=f"block_size is {block_size}"):
        BlockHasher(block_size=block_size)


def test_an_unknown_algorithm_is_refused_with_the_known_ones():
    with pytest.raises(InvalidArgumentError, match="unknown hash algorithm 'md5'; known are xxh3_128"):
        BlockHasher("md5")


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(HASH_ALGORITHMS),
    st.lists(st.integers(0, 2**64 - 1), max_size=80),
    st.integers(1, 9),
    st.lists(st.integers(0, 80), max_size=4),
)
def test_hashing_in_steps_equals_hashing_the_whole(algorithm, tokens, block_size, cuts):
    hasher = BlockHasher(algorithm, "s", block_size)
    hashes = []
    for cut in [*sorted(cuts), len(tokens)]:
        start = len(hashes) * block_size
        hashes += hasher.hash_blocks(tokens[start:cut], hashes[-1] if hashes else None)
    assert hashes == hasher.hash_blocks(tokens)


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_a_hash_waits_for_its_lookahead_tokens(algorithm):
    hasher = BlockHasher(algorithm, "s", 4, num_lookahead_tokens=2)
    assert hasher.hash_blocks(range(5)) == []
    one = hasher.hash_blocks(range(6))
    assert len(one) == 1
    assert hasher.hash_blocks([*range(5), 99]) != one
    assert hasher.hash_blocks(range(100))[0] == one[0]
    request = Request("r", range(5), hasher)
    for token in range(5, 20):
        request.append_output_token_ids([token])
    assert request.block_hashes == hasher.hash_blocks(range(20))
    assert len(request.block_hashes) == 4


def test_a_negative_lookahead_is_refused():
    with pytest.raises(InvalidArgumentError, match="num_lookahead_tokens is -1"):
        BlockHasher(num_lookahead_tokens=-1)


def test_a_block_size_passed_as_the_seed_is_refused():
    with pytest.raises(InvalidTypeError, match="seed is of type int"):
        BlockHasher("sha256_cbor", 16)
