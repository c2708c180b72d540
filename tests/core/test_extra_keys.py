import hashlib

import numpy as np
import pytest
from drawing import make_request

from kv_pool import BlockHasher, LoRARequest, MultiModalFeature, PlaceholderRange
from kv_pool.core.extra_keys import find_extra_keys, untag_extra_keys

IMAGE = MultiModalFeature("img", PlaceholderRange(offset=6, length=4))
CLIP = MultiModalFeature("clip", PlaceholderRange(offset=10, length=3))


def test_a_plain_request_has_none():
    assert find_extra_keys(make_request([]), 0, 4) is None
    assert untag_extra_keys(None) is None


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (0, None),
        (4, (("mm", "img", 2),)),
        (8, (("mm", "img", -2), ("mm", "clip", 2))),
        (12, (("mm", "clip", -2),)),
        (16, None),
    ],
)
def test_an_input_counts_in_every_block_it_reaches_into(start, expected):
    request = make_request([], mm_features=[IMAGE, CLIP])
    assert find_extra_keys(request, start, start + 4) == expected


def test_the_salt_counts_in_the_first_block_only():
    request = make_request([], cache_salt="s")
    assert find_extra_keys(request, 0, 4) == (("cache_salt", "s"),)
    assert find_extra_keys(request, 4, 8) is None


def test_the_order_is_adapter_inputs_salt():
    request = make_request(
        [],
        cache_salt="s",
        lora_request=LoRARequest(1, "a", "/a"),
        mm_features=[MultiModalFeature("img", PlaceholderRange(0, 1))],
    )
    keys = find_extra_keys(request, 0, 4)
    assert keys == (("lora", "a", "/a"), ("mm", "img", 0), ("cache_salt", "s"))
    assert untag_extra_keys(keys) == ("a", ("img", 0), "s")


def make_embedded(rows):
    return make_request([], block_size=4, prompt_embeds=rows, _prompt_embeds_per_block_hashes={})


def test_embeddings_count_by_the_digest_of_their_rows():
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    request = make_embedded(rows)
    digest = hashlib.sha256(rows[4:8].tobytes()).digest()
    keys = find_extra_keys(request, 4, 8)
    assert keys == (("prompt_embeds", digest),)
    assert untag_extra_keys(keys) == (digest,)
    assert request._prompt_embeds_per_block_hashes == {(4, 8): digest}
    rows[4:8] = 0
    assert find_extra_keys(request, 4, 8) == keys  # kept per request


def test_equal_embeddings_share_blocks_and_others_do_not():
    def first_hash(scale):
        request = make_embedded(np.full((4, 2), scale, dtype=np.float16))
        request.all_token_ids = [0] * 4
        return BlockHasher("sha256_cbor", block_size=4).hash_request(request)

    assert first_hash(1) == first_hash(1)
    assert first_hash(1) != first_hash(2)
    plain = make_request([], block_size=4)
    plain.all_token_ids = [0] * 4
    assert first_hash(1) != BlockHasher("sha256_cbor", block_size=4).hash_request(plain)
