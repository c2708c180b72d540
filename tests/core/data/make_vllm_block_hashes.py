"""The recipe of vllm_block_hashes.json: run this where vLLM 0.33.0 imports.

python tests/core/data/make_vllm_block_hashes.py > tests/core/data/vllm_block_hashes.json
"""

import json
import os
import random
import sys
from types import SimpleNamespace

SEEDS = (None, "0", "a seed")


def make_cases():
    """Return prompts that differ in length, token size and extra keys, as JSON-compatible values."""
    rng = random.Random(7)
    cases = []
    for block_size in (1, 4, 16, 24, 256, 300):
        for widest in (23, 24, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**64 - 1):
            tokens = [rng.randrange(widest + 1) for _ in range(3 * block_size + block_size // 2)]
            tokens[0] = widest
            cases.append({"block_size": block_size, "tokens": tokens})
    lora = {"adapter_id": 3, "name": "adapter-a", "path": "/adapters/a"}
    features = [["img0", 3, 6], ["img1", 9, 20], ["img2", 29, 1]]
    for extras in (
        {"lora": lora},
        {"cache_salt": "tenant-1"},
        {"mm_features": features},
        {"lora": lora, "mm_features": features, "cache_salt": "ünïcode"},
    ):
        cases.append({"block_size": 4, "tokens": [rng.randrange(50_000) for _ in range(34)], **extras})
    for num_lookahead in (1, 3):
        for extras in ({}, {"lora": lora, "mm_features": features, "cache_salt": "tenant-1"}):
            tokens = [rng.randrange(50_000) for _ in range(34)]
            cases.append({"block_size": 4, "tokens": tokens, "num_lookahead": num_lookahead, **extras})
    return cases


def hash_with_vllm(case):
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    lora = case.get("lora")
    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(case["tokens"]),
        all_token_ids=case["tokens"],
        cache_salt=case.get("cache_salt"),
        prompt_embeds=None,
        lora_request=lora
        and SimpleNamespace(adapter_id=lora["adapter_id"], lora_name=lora["name"], lora_path=lora["path"]),
        mm_features=[
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
            for name, offset, length in case.get("mm_features", [])
        ],
    )
    hasher = get_request_block_hasher(case["block_size"], sha256_cbor, case.get("num_lookahead", 0))
    return [found.hex() for found in hasher(request)]


def main():
    import vllm
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils

    made = []
    for seed in SEEDS:
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        kv_cache_utils.init_none_hash(sha256_cbor)
        made.append(
            {
                "seed": seed,
                "root": kv_cache_utils.NONE_HASH.hex(),
                "hashes": [hash_with_vllm(case) for case in make_cases()],
            }
        )
    json.dump({"vllm": vllm.__version__, "cases": make_cases(), "made": made}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
