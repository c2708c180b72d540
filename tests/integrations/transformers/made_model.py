"""A tiny Llama with random weights, its output without a pool, and a pool for it."""

import functools
from contextlib import suppress

from kv_pool import BlockHasher, KVCacheManager, Request
from kv_pool.contiguous.invariants import check
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tiered_cache import TieredCache

with suppress(ImportError):  # the tests that need these are left out
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kv_pool.integrations.transformers import PagedCache, PagedSequences, allocate_storage

    torch.set_num_threads(1)  # the tensors are tiny: threads would only slow it down

BLOCK_SIZE, NUM_LAYERS, VOCABULARY = 4, 2, 97
HASHER = BlockHasher("sha256", block_size=BLOCK_SIZE)


@functools.cache
def make_model(attention="sdpa", device="cpu", dtype="float64"):
    """Return a model with the same large weights on any device: its output depends on K and V."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.4,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).to(device=device, dtype=getattr(torch, dtype)).eval()
    model.generation_config.do_sample = False
    return model


@functools.cache
def generate_dense(prompt, num_tokens):
    """Return the tokens generated after `prompt`, a tuple, with transformers' own cache."""
    input_ids = torch.tensor([prompt])
    output = make_model().generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=num_tokens
    )
    return output[0, len(prompt) :].tolist()


def find_dense_kv(token_ids):
    """Return [(key, value)] per layer of all these tokens, each (num_tokens, num_kv_heads, head_size)."""
    with torch.no_grad():
        layers = make_model()(torch.tensor([token_ids])).cache.layers
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers]


def make_sequences(num_blocks=40, layout="NHD", model=None, block_size=BLOCK_SIZE, add_tiers=None):
    """Return sequences; `add_tiers` creates the tiers from pool and storage."""
    pool = RunBlockPool(num_blocks, True, BLOCK_SIZE)
    storage = allocate_storage(model or make_model(), num_blocks, block_size, layout)
    tiers = None if add_tiers is None else add_tiers(pool, storage)
    return PagedSequences(KVCacheManager(pool, block_size), storage, run_length=4, tiers=tiers)


def make_tiers(num_host_blocks, num_disk_blocks, folder, write):
    """Return `add_tiers` for `make_sequences`; 0 blocks omit a tier."""

    def add(pool, storage):
        tiers = []
        if num_host_blocks:
            tiers.append(HostTier(num_host_blocks, storage))
        if num_disk_blocks:
            tiers.append(DiskTier(folder, num_disk_blocks, BlockLayout.describe(storage, BLOCK_SIZE, HASHER)))
        return TieredCache(pool, storage, tiers, write)

    return add


def make_request(request_id, prompt):
    return Request(request_id, list(prompt), HASHER)


def check_kv(sequences, request):
    """Check that the K and V of computed tokens are those of the dense model."""
    num_tokens = request.num_computed_tokens
    if not num_tokens:
        return
    slots = sequences.get_slots(request, 0, num_tokens)
    for layer, (key, value) in enumerate(find_dense_kv(request.all_token_ids[:num_tokens])):
        found = sequences.storage.read(layer, slots)
        torch.testing.assert_close(found[0].cpu(), key, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[1].cpu(), value, rtol=1e-9, atol=1e-9)


def generate(sequences, request, num_tokens, model=None):
    """Generate up to this many tokens, and compare them, their K and V, and the invariants."""
    while request.num_tokens - request.num_prompt_tokens < num_tokens:
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        run_step(model or make_model(), sequences, [request], [num_new_tokens])
    prompt = tuple(request.all_token_ids[: request.num_prompt_tokens])
    assert request.all_token_ids[len(prompt) :] == generate_dense(prompt, num_tokens)
    check_kv(sequences, request)
    check(sequences.manager.block_pool)


def run_step(model, sequences, requests, num_new_tokens, gathers=True):
    """Run one forward pass; append the next token to rows whose last token was computed."""
    cache = PagedCache(sequences, requests, num_new_tokens, gathers=gathers)
    with torch.no_grad():
        logits = model(**cache.make_inputs()).logits
    for row, (request, count) in enumerate(zip(requests, num_new_tokens, strict=True)):
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids([int(logits[row, count - 1].argmax())])
