"""Print the test vectors of salt regions: `python make_salt_region_vectors.py > salt_region_vectors.json`."""

import json

from cbor2 import dumps

from kv_pool import BlockHasher, LoRARequest, MultiModalFeature, PlaceholderRange, Request, SaltRegion
from kv_pool.core.block_hash import HASH_ALGORITHMS
from kv_pool.core.extra_keys import find_extra_keys

BLOCK_SIZE = 4
SEED = "0"
TOKENS = list(range(1, 13))
CASES = [
    {"name": "no-salts"},
    {"name": "from-the-start", "salt_regions": [[0, "tenant-a"]]},
    {"name": "at-a-border", "salt_regions": [[4, "tenant-a"]]},
    {"name": "at-a-border-other-tenant", "salt_regions": [[4, "tenant-b"]]},
    {"name": "within-a-block", "salt_regions": [[6, "tenant-a"]]},
    {"name": "two-in-a-block", "salt_regions": [[5, "tenant-a"], [6, "user-7"]]},
    {"name": "two-blocks", "salt_regions": [[4, "tenant-a"], [8, "user-7"]]},
    {"name": "text-is-utf-8", "salt_regions": [[4, "ténant"]]},
    {"name": "with-cache-salt", "salt_regions": [[4, "tenant-a"]], "cache_salt": "s"},
    {"name": "with-adapter", "salt_regions": [[4, "tenant-a"]], "adapter": ["lora", "/lora"]},
    {"name": "with-media", "salt_regions": [[6, "tenant-a"]], "media": [["image", 2, 5]]},
    {"name": "cache-salt-alone", "cache_salt": "tenant-a"},
    {"name": "media-alone", "media": [["image", 2, 5]]},
]


def make_case(case):
    """Return the case with its extra keys and hashes."""
    adapter = case.get("adapter")
    hashes = {}
    for algorithm in HASH_ALGORITHMS:
        request = Request(
            "r",
            TOKENS,
            BlockHasher(algorithm, SEED, BLOCK_SIZE),
            lora_request=adapter and LoRARequest(1, *adapter),
            mm_features=[
                MultiModalFeature(name, PlaceholderRange(offset, length))
                for name, offset, length in case.get("media", [])
            ],
            cache_salt=case.get("cache_salt"),
            salt_regions=[SaltRegion(*region) for region in case.get("salt_regions", [])],
        )
        hashes[algorithm] = [block_hash.hex() for block_hash in request.block_hashes]
    found = [find_extra_keys(request, start, start + BLOCK_SIZE) for start in range(0, 12, BLOCK_SIZE)]
    return {
        **case,
        "tokens": TOKENS,
        "extra_keys_cbor": [keys and dumps(keys, canonical=True).hex() for keys in found],
        "hashes": hashes,
    }


print(
    json.dumps({"block_size": BLOCK_SIZE, "seed": SEED, "cases": [make_case(one) for one in CASES]}, indent=1)
)
