import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cbor2 import loads
from core.salted_inputs import BLOCK_SIZE, change, describe, describe_as_vllm, draw_input, make_salted
from drawing import make_request

from kv_pool import (
    BlockHasher,
    BlockPool,
    InvalidArgumentError,
    InvalidTypeError,
    LoRARequest,
    MultiModalFeature,
    PlaceholderRange,
    Request,
    SaltRegion,
)
from kv_pool.core.block_hash import HASH_ALGORITHMS
from kv_pool.core.extra_keys import find_extra_keys, untag_extra_keys
from kv_pool.core.salt_regions import MAX_SALT_REGIONS
from kv_pool.events.mirror import PrefixMirror

VECTORS = json.loads((Path(__file__).parent / "data" / "salt_region_vectors.json").read_text())


def hash_with(regions, tokens=range(16), algorithm="sha256", **options):
    hasher = BlockHasher(algorithm, "s", BLOCK_SIZE)
    return Request("r", tokens, hasher, salt_regions=regions, **options).block_hashes


def test_a_region_may_begin_in_the_generated_tokens():
    hasher = BlockHasher("sha256", "s", BLOCK_SIZE)
    request = Request("r", range(6), hasher, salt_regions=[SaltRegion(6, "a")])
    plain = Request("r", range(6), hasher)
    assert request.block_hashes == plain.block_hashes
    for one in (request, plain):
        one.append_output_token_ids([6, 7, 8])
    assert request.block_hashes[0] == plain.block_hashes[0]
    assert request.block_hashes[1] != plain.block_hashes[1]


def test_with_regions_media_are_keyed_with_their_length():
    request = make_request(
        [],
        cache_salt="s",
        lora_request=LoRARequest(1, "n", "p"),
        mm_features=[MultiModalFeature("i", PlaceholderRange(1, 2))],
        salt_regions=[SaltRegion(0, "a"), SaltRegion(3, "b")],
    )
    keys = find_extra_keys(request, 0, 4)
    assert keys == (
        ("lora", "n", "p"),
        ("media", "i", 1, 2),
        ("cache_salt", "s"),
        ("salt_region", "a", 0),
        ("salt_region", "b", 3),
    )
    assert untag_extra_keys(keys) == ("n", ("i", 1), 2, "s", "a", 0, "b", 3)
    assert find_extra_keys(request, 4, 8) == (("lora", "n", "p"),)


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"salt_regions": [(4, "a")]}, {"salt_regions": [(6, "a")]}),
        ({"salt_regions": [(4, "a"), (6, "b")]}, {"salt_regions": [(4, "a"), (7, "b")]}),
        ({"salt_regions": [(4, "a"), (5, "b")]}, {"salt_regions": [(4, "a")], "cache_salt": "b"}),
        ({"salt_regions": [(4, "i")]}, {"media": [("i", 4, 2)]}),
        (
            {"salt_regions": [(4, "a")], "media": [("i", 5, 2)]},
            {"salt_regions": [(4, "a")], "media": [("i", 5, 3)]},
        ),
    ],
    ids=str,
)
def test_readers_of_tokens_find_what_the_pool_hits(own, other):
    """A reader of tokens found 8 tokens of a region with another offset; the pool hit none."""

    def make(request_id, given):
        media = [MultiModalFeature(name, PlaceholderRange(*place)) for name, *place in given.get("media", [])]
        regions = [SaltRegion(*region) for region in given.get("salt_regions", [])]
        salt = given.get("cache_salt")
        return Request(
            request_id, range(12), hasher, mm_features=media, salt_regions=regions or None, cache_salt=salt
        )

    hasher = BlockHasher("sha256", "s", BLOCK_SIZE)
    requests = [make("own", own), make("other", other)]
    pool = BlockPool(10, True, BLOCK_SIZE, enable_kv_cache_events=True)
    mirror = PrefixMirror(learns_tokens=True)
    for number, request in enumerate(requests):
        pool.cache_full_blocks(request, pool.get_new_blocks(3), 0, 3, BLOCK_SIZE, 0)
        mirror.apply(str(number), pool.take_events())
    for request in requests:
        walk = [untag_extra_keys(find_extra_keys(request, start, start + 4)) for start in (0, 4, 8)]
        found = mirror.find_prefix_of_tokens(range(12), extra_keys=walk)
        for number, of_publisher in enumerate(requests):
            same = [a == b for a, b in zip(request.block_hashes, of_publisher.block_hashes, strict=True)]
            assert found.get(str(number), 0) == 4 * [*same, False].index(False)


@pytest.mark.parametrize(
    ("regions", "error", "message"),
    [
        ([(4, "a"), (4, "b")], InvalidArgumentError, "must start at 5 or later"),
        ([(4, "a"), (2, "b")], InvalidArgumentError, "must start at 5 or later"),
        ([(-1, "a")], InvalidArgumentError, "must start at 0 or later"),
        ([(0, "")], InvalidArgumentError, "tokens after a private region cannot be public"),
        ([(0, None)], InvalidTypeError, "salt is of type NoneType"),
        ([(0, b"a")], InvalidTypeError, "salt is of type bytes"),
        ([("0", "a")], InvalidTypeError, "start is of type str"),
        ([(start, "a") for start in range(MAX_SALT_REGIONS + 1)], InvalidArgumentError, "at most 256"),
    ],
)
def test_impossible_regions_are_refused(regions, error, message):
    with pytest.raises(error, match=message):
        hash_with([SaltRegion(*region) for region in regions])
    request = make_salted(
        {"tokens": list(range(8)), "regions": regions, "adapter": None, "media": [], "cache_salt": None}
    )
    with pytest.raises(error, match=message):
        BlockHasher("sha256", "s", BLOCK_SIZE).hash_request(request)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("cache_salt", "", "cache_salt is empty"),
        ("cache_salt", b"a", "cache_salt is of type bytes"),
        ("lora_request", SimpleNamespace(lora_name=b"a", lora_path="p"), "lora_name of a request"),
        ("lora_request", SimpleNamespace(lora_name="a", lora_path=None), "lora_path of a request"),
        ("mm_features", [MultiModalFeature(("a",), PlaceholderRange(0, 1))], "identifier of a request"),
        ("mm_features", [MultiModalFeature(1, PlaceholderRange(0, 1))], "identifier of a request"),
    ],
)
def test_with_regions_ambiguous_types_are_refused(field, value, message):
    request = make_request([], salt_regions=[SaltRegion(0, "a")], **{field: value})
    with pytest.raises((InvalidTypeError, InvalidArgumentError), match=message):
        find_extra_keys(request, 0, 4)


def read_case(case):
    adapter = case.get("adapter")
    return {
        "lora_request": adapter and LoRARequest(1, *adapter),
        "mm_features": [
            MultiModalFeature(name, PlaceholderRange(offset, length))
            for name, offset, length in case.get("media", [])
        ],
        "cache_salt": case.get("cache_salt"),
        "salt_regions": [SaltRegion(*region) for region in case.get("salt_regions", [])],
    }


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["name"])
def test_published_vectors(case):
    """The vectors are in tests/core/data/, the recipe in kv_pool/manager/requests/salts.md."""
    options = read_case(case)
    for algorithm in HASH_ALGORITHMS:
        hasher = BlockHasher(algorithm, VECTORS["seed"], VECTORS["block_size"])
        request = Request("r", case["tokens"], hasher, **options)
        assert [one.hex() for one in request.block_hashes] == case["hashes"][algorithm]
    for position, text in enumerate(case["extra_keys_cbor"]):
        start = position * VECTORS["block_size"]
        keys = find_extra_keys(request, start, start + VECTORS["block_size"])
        decoded = None if text is None else loads(bytes.fromhex(text))
        assert decoded == (None if keys is None else [list(key) for key in keys])


def test_the_page_about_salts_shows_these_vectors():
    page = Path(__file__).parents[2].joinpath("kv_pool", "manager", "requests", "salts.md").read_text()
    for case in VECTORS["cases"]:
        (row,) = re.findall(rf"^\| {case['name']} \|.*$", page, re.MULTILINE)
        second, third = case["hashes"]["sha256_cbor"][1:]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        keys = case["extra_keys_cbor"][1]
        assert cells[2:] == [f"`{keys}`" if keys else "none", f"`{second[:16]}`", f"`{third[:16]}`"]


def compare_inputs(inputs, seen, algorithm="sha256"):
    """Hash each input. Fail if two different ones have the same last hash. Return the number of hashes.

    Equal digests mean equal bytes, and each digest covers the one before it. An input without regions is
    compared without what vLLM's keys do not cover.
    """
    hasher = BlockHasher(algorithm, "s", BLOCK_SIZE)
    num_hashed = 0
    for one in inputs:
        try:
            hashes = hasher.hash_request(make_salted(one))
        except (InvalidArgumentError, InvalidTypeError):
            continue
        if not hashes:
            continue
        text = describe(one) if one["regions"] else describe_as_vllm(one)
        assert seen.setdefault(hashes[-1], text) == text
        num_hashed += 1
    return num_hashed


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(9))
def test_no_two_mutated_inputs_have_equal_bytes(seed, share):
    assert fuzz(seed, 400, share) > 250


def fuzz(seed, num_inputs, share):
    """Hash inputs that differ by one change each from an earlier one. Return the number of hashed ones.

    Args:
        share: of the inputs that have salt regions.
    """
    rng = random.Random(seed)
    seen = {}
    drawn = [draw_input(rng)]
    num_hashed = 0
    while num_inputs:
        if rng.random() < 0.2:
            drawn.append(draw_input(rng))
        changed = change(rng.choice(drawn[-50:]), rng)
        if not changed["regions"]:
            continue
        num_inputs -= 1
        shown = changed
        if rng.random() >= share:
            texts = [one for one in changed["media"] if isinstance(one[0], (str, bytes))]
            shown = {**changed, "regions": [], "media": texts}
        if compare_inputs([shown], seen, HASH_ALGORITHMS[seed % 3]):
            num_hashed += 1
            drawn.append(changed)
    assert len(seen) > num_hashed // 3
    return num_hashed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": ""}, {"cache_salt": None}),
        ({"media": [("i", 1, 2)]}, {"media": [("i", 1, 3)]}),
        ({"media": [("i", 4, 0)]}, {"media": []}),
        ({"media": [(("i",), 0, 1)]}, {"media": [(["i"], 0, 1)]}),
    ],
    ids=["empty-salt", "length-of-media", "medium-without-tokens", "tuple-and-list"],
)
def test_inputs_that_the_form_of_vllm_confuses(one, other):
    """Limits of the form that is kept for compatibility, listed in kv_pool/manager/requests/salts.md."""
    empty = {"tokens": list(range(8)), "regions": [], "adapter": None, "media": [], "cache_salt": None}
    for algorithm in HASH_ALGORITHMS:
        hasher = BlockHasher(algorithm, "s", BLOCK_SIZE)
        found = [hasher.hash_request(make_salted({**empty, **fields})) for fields in (one, other)]
        assert found[0] == found[1]
    private = {**empty, "regions": [(4, "a")]}
    hasher = BlockHasher("sha256", "s", BLOCK_SIZE)
    found = []
    for fields in (one, other):
        try:
            found.append(hasher.hash_request(make_salted({**private, **fields})))
        except (InvalidArgumentError, InvalidTypeError) as error:
            found.append(error)
    assert found[0] != found[1]
