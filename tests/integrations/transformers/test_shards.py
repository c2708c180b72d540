"""Tensor parallelism: one pool, with the KV heads on several devices."""

import pytest
from integrations.transformers.made_model import (
    BLOCK_SIZE,
    HASHER,
    check_kv,
    generate_dense,
    make_model,
    make_request,
    make_sequences,
    run_step,
)

from kv_pool import InvalidArgumentError, KVCacheManager
from kv_pool.contiguous.run_pool import RunBlockPool

pytestmark = pytest.mark.transformers

PROMPT = tuple(range(10, 31))
CPU_TWICE = ("cpu", "cpu")


def make_sharded(num_blocks=40, layout="NHD", devices=CPU_TWICE):
    from kv_pool.integrations.transformers import PagedSequences, allocate_shards

    pool = RunBlockPool(num_blocks, True, BLOCK_SIZE)
    storage = allocate_shards(make_model(), num_blocks, BLOCK_SIZE, devices, layout)
    return PagedSequences(KVCacheManager(pool, BLOCK_SIZE), storage, run_length=4)


@pytest.mark.parametrize("layout", ["NHD", "HND", "FLASH"])
def test_concatenated_shards_equal_the_attention_of_all_heads(layout):
    """Each shard computes attention over its heads with the same block tables."""
    import torch
    from integrations.attention.made_batch import make_batch

    from kv_pool.integrations.attention import paged_attention
    from kv_pool.manager.slot_mapping import list_slots
    from kv_pool.storage import KVStorage
    from kv_pool.storage.sharded_storage import ShardedStorage

    batch = make_batch([3, 9, 30], [1, 9, 5], (12, 6), layout=layout)
    # Unequal parts: 2 and 4 of the 6 KV heads.
    shards = [
        KVStorage.allocate(
            batch.storage.num_blocks, 4, 2, heads, 8, "float64", layout=layout, library="torch"
        )
        for heads in (2, 4)
    ]
    sharded = ShardedStorage(shards)
    for table, (key, value) in zip(batch.tables, batch.dense, strict=True):
        slots = list_slots(table, 0, len(key), 4)
        sharded.write(1, slots, key, value)
        found = sharded.read(1, slots)
        assert torch.equal(found[0], key)
        assert torch.equal(found[1], value)
    attended = [
        paged_attention(part, *shard.get_caches(1), batch.tables, batch.seq_lens, [0, 1, 10, 15])
        for shard, part in zip(shards, sharded.split_heads(batch.query), strict=True)
    ]
    assert [part.shape[1] for part in attended] == [4, 8]
    torch.testing.assert_close(torch.cat(attended, 1), batch.attend(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "attention over blocks"])
def test_model_generates_the_same_from_shards_with_moved_blocks(gathers):
    model = make_model("sdpa" if gathers else "kv_pool")
    sequences = make_sharded()
    requests = [make_request(str(length), PROMPT[:length]) for length in (5, 9, 21)]
    for request in requests:
        sequences.admit(request)
    run_step(model, sequences, requests, [5, 9, 21], gathers)
    sequences.free(requests.pop(0))
    num_moved = 0
    for _ in range(6):
        num_moved += sequences.defragment()
        run_step(model, sequences, requests, [1, 1], gathers)
    assert num_moved > 0
    for request in requests:
        generated = request.all_token_ids[request.num_prompt_tokens :]
        prompt = tuple(request.all_token_ids[: request.num_prompt_tokens])
        assert generated == generate_dense(prompt, len(generated))
        check_kv(sequences, request)


def test_requests_fork_and_migrate_between_pools_with_shards():
    here, there = make_sharded(), make_sharded(layout="HND")
    request = make_request("r", PROMPT)
    here.admit(request)
    run_step(make_model(), here, [request], [21])
    child = make_request("child", request.all_token_ids)
    here.fork(request, child)
    check_kv(here, child)
    with pytest.raises(InvalidArgumentError, match="the other is not"):
        here.migrate(request, make_sequences())
    assert here.migrate(request, there)
    check_kv(there, request)
    for _ in range(4):
        run_step(make_model(), there, [request], [1])
    assert request.all_token_ids[21:] == generate_dense(PROMPT, 5)


def test_invalid_shards_are_rejected():
    import torch

    from kv_pool.integrations.transformers import allocate_shards
    from kv_pool.storage import KVStorage
    from kv_pool.storage.sharded_storage import ShardedStorage

    with pytest.raises(InvalidArgumentError, match="2 KV heads cannot be divided equally"):
        allocate_shards(make_model(), 8, 4, ["cpu"] * 3)
    for ask in (lambda: make_sharded().make_site(HASHER, {}), make_sharded().get_sequences):
        with pytest.raises(InvalidArgumentError, match="cannot migrate to other processes"):
            ask()
    with pytest.raises(InvalidArgumentError, match="and equal"):
        ShardedStorage([])
    one, other = (KVStorage.allocate(8, 4, 2, 2, size, "float32", library="torch") for size in (8, 16))
    with pytest.raises(InvalidArgumentError, match="and equal"):
        ShardedStorage([one, other])
    sharded = ShardedStorage([one, one])
    with pytest.raises(InvalidArgumentError, match="1 slots need"):
        sharded.write(0, [3], torch.zeros(1, 3, 8), torch.zeros(1, 4, 8))
    with pytest.raises(InvalidArgumentError, match="6 heads are not a multiple of 4"):
        sharded.split_heads(torch.zeros(1, 6, 8))
    with pytest.raises(InvalidArgumentError, match="2 shards, the other 1"):
        sharded.copy_to(ShardedStorage([one]), [(1, 2)])
    assert sharded.block_bytes == 2 * one.block_bytes
