"""Events equal those of vLLM 0.33 byte for byte: golden vectors encoded by vLLM, in consecutive steps.

Recipe (vLLM 0.33.0, sha256_cbor, PYTHONHASHSEED unset, block size 4, pool of 6 blocks, group 0, the kind
added by the manager, ts 1700000000.5): make the requests below with vLLM's Request and KVCacheManager, and
encode `KVEventBatch(ts=..., events=manager.take_events(), data_parallel_rank=...)` with msgspec.msgpack.
"""

import msgspec

from kv_pool import (
    BlockHasher,
    BlockPool,
    KVCacheManager,
    LoRARequest,
    Request,
)

# ruff: noqa: E501
V1 = "93cb41d954fc4020000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf84b146b151d55111cfd43b57df56b58fb1b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
V2 = "93cb41d954fc4020000091de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf720b6a2c26ad57e4b1706172656e745f626c6f636b5f68617368cfd43b57df56b58fb1a9746f6b656e5f69647394ce0001117005cd012cce00030d40aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a3732d3101"
V3 = "93cb41d954fc402000009384a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf720b6a2c26ad57e4a66d656469756da3475055a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfd43b57df56b58fb1a66d656469756da3475055a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf84b146b151d55111a66d656469756da3475055a967726f75705f6964780000"
V4 = "93cb41d954fc4020000091de000ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfbf4c352d2cb69ba9b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739409090909aa626c6f636b5f73697a6504a76c6f72615f696403a66d656469756da3475055a96c6f72615f6e616d65a9616461707465722d61aa65787472615f6b6579739192a9616461707465722d61a874656e616e742d31a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00"
V5 = "93cb41d954fc402000009181a474797065b0416c6c426c6f636b73436c656172656400"


def encode(manager, rank=0):
    return msgspec.msgpack.encode([1700000000.5, manager.take_events(), rank]).hex()


def test_the_stream_equals_that_of_vllm_byte_for_byte():
    manager = KVCacheManager(BlockPool(6, True, 4, enable_kv_cache_events=True))
    hasher = BlockHasher("sha256_cbor", block_size=4)
    first = Request("A", range(1, 11), hasher)
    manager.allocate_slots(first, 10)
    assert encode(manager) == V1

    manager.free(first)
    second = Request("B", [*range(1, 9), 70000, 5, 300, 200000], hasher, session_id="s-1")
    prefix = manager.get_computed_blocks(second)
    assert prefix.num_tokens == 8
    manager.allocate_slots(second, 4, prefix)
    assert encode(manager, rank=1) == V2

    manager.free(second)
    taken = manager.block_pool.get_new_blocks(5)
    assert encode(manager) == V3

    manager.block_pool.free_blocks(taken)
    lora = LoRARequest(3, "adapter-a", "/adapters/a")
    salted = Request("C", [9, 9, 9, 9], hasher, lora_request=lora, cache_salt="tenant-1")
    manager.allocate_slots(salted, 4)
    assert encode(manager) == V4

    manager.free(salted)
    assert manager.reset_prefix_cache()
    assert encode(manager) == V5
