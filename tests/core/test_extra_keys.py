import hashlib
import random

import numpy as np
import pytest
from drawing import make_request

from kv_pool import (
    BlockHasher,
    BlockPool,
    InvalidArgumentError,
    KVCacheManager,
    LoRARequest,
    MultiModalFeature,
    PlaceholderRange,
    Request,
)
from kv_pool.core.extra_keys import ExtraKeysWalk, find_extra_keys, untag_extra_keys

IMAGE = MultiModalFeature("img", PlaceholderRange(offset=6, length=4))
CLIP = MultiModalFeature("clip", PlaceholderRange(offset=10, length=3))


class CountedFeature:
    """A multimodal input that counts how often its position is read."""

    def __init__(self, identifier, offset, length):
        self.identifier = identifier
        self.position = PlaceholderRange(offset, length)
        self.num_reads = 0

    @property
    def mm_position(self):
        self.num_reads += 1
        return self.position


def test_the_cost_of_many_inputs_is_not_quadratic():
    features = [CountedFeature(str(number), 4 * number, 4) for number in range(500)]
    request = make_request([], mm_features=features, all_token_ids=list(range(2000)))
    assert len(BlockHasher("sha256", "", 4).hash_request(request)) == 500
    assert max(feature.num_reads for feature in features) < 10


@pytest.mark.parametrize("algorithm", ["xxh3_128", "sha256_cbor"])
def test_the_order_of_inputs_does_not_matter(algorithm):
    """A bug: an input listed after one with a higher offset was missing from the keys of its blocks."""
    hasher = BlockHasher(algorithm, "s", 4)
    made = [Request("r", range(20), hasher, mm_features=order) for order in ([IMAGE, CLIP], [CLIP, IMAGE])]
    assert made[0].block_hashes == made[1].block_hashes
    other = MultiModalFeature("other", PlaceholderRange(offset=6, length=4))
    different = Request("r", range(20), hasher, mm_features=[CLIP, other])
    assert different.block_hashes[1] != made[0].block_hashes[1]
    found = [find_extra_keys(request, 8, 12) for request in made]
    assert found[0] == found[1] == (("mm", "img", -2), ("mm", "clip", 2))
    stored = []
    for request in made:
        pool = BlockPool(7, True, 4, enable_kv_cache_events=True)
        pool.cache_full_blocks(request, pool.get_new_blocks(5), 0, 5, 4, 0)
        stored += [event.extra_keys for event in pool.take_events()]
    assert stored[0] == stored[1]


@pytest.mark.parametrize("text", ["session_id", "cache_salt", "lora", "mm"])
def test_text_that_events_cannot_encode_caches_nothing(text):
    lone = "\ud800"
    options = {
        "lora": {"lora_request": LoRARequest(1, lone, "p")},
        "mm": {"mm_features": [MultiModalFeature(lone, PlaceholderRange(0, 2))]},
    }.get(text, {text: lone})
    request = make_request([b"h" * 16], num_tokens=4, num_computed_tokens=0, **options)
    pool = BlockPool(4, True, 4, enable_kv_cache_events=True)
    manager = KVCacheManager(pool)
    with pytest.raises(InvalidArgumentError, match="surrogates not allowed"):
        manager.allocate_slots(request, 4)
    assert pool.get_num_free_blocks() == 3
    assert pool.take_events() == []


def find_slowly(features, start, end):
    reaching = [feature for feature in features if feature.mm_position.offset < end]
    return tuple(
        ("mm", feature.identifier, feature.mm_position.offset - start)
        for feature in reaching
        if feature.mm_position.offset + feature.mm_position.length > start
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_walk_agrees_with_a_search_of_all_inputs(seed):
    rng = random.Random(seed)
    offsets = sorted(rng.randrange(100) for _ in range(rng.randrange(1, 12)))
    features = [
        MultiModalFeature(f"input {number}", PlaceholderRange(offset, rng.choice([0, 1, 5, 60])))
        for number, offset in enumerate(offsets)
    ]
    request = make_request([], mm_features=features)
    block_size, num_lookahead = rng.choice([1, 3, 8]), rng.choice([0, 2])
    first = rng.choice([0, 5 * block_size])
    walk = ExtraKeysWalk(request)
    for start in range(first, 130, block_size):
        if rng.random() < 0.2:
            continue  # the walk may skip blocks
        end = start + block_size + num_lookahead
        expected = find_slowly(features, start, end) or None
        assert walk.find(start, end) == expected
        assert find_extra_keys(request, start, end) == expected


def make_embedded(rows):
    return make_request([], block_size=4, prompt_embeds=rows, _prompt_embeds_per_block_hashes={})


def test_embeddings_are_keyed_by_the_digest_of_their_rows():
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    request = make_embedded(rows)
    digest = hashlib.sha256(rows[4:8].tobytes()).digest()
    keys = find_extra_keys(request, 4, 8)
    assert keys == (("prompt_embeds", digest),)
    assert untag_extra_keys(keys) == (digest,)
    assert request._prompt_embeds_per_block_hashes == {(4, 8): digest}
    rows[4:8] = 0
    assert find_extra_keys(request, 4, 8) == keys  # cached per request
