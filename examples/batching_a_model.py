"""The scheduler of continuous_batching.py over a small Llama whose keys and values are in the pool's blocks.

Prompts are computed in chunks, together with sequences that decode; some requests are preempted, or swapped
to the host and back. Each output is compared with the output of transformers with its own cache.

Run it: pip install '.[transformers]' && python examples/batching_a_model.py
"""

import random
import sys
from typing import Any

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"this example needs torch and transformers ({error}): pip install '.[transformers]'")
from continuous_batching import Scheduler, Sequence

from kv_pool import BlockHasher, BlockPool, BlockSwapper, KVCacheManager
from kv_pool.integrations.transformers import PagedCache, PagedSequences, allocate_storage
from kv_pool.manager import PreemptionCost

BLOCK_SIZE, NUM_BLOCKS, NUM_HOST_BLOCKS, VOCABULARY = 8, 41, 41, 128


def make_model(attention: str) -> Any:
    """Return a model with fixed random weights. In float64 rounding does not change the output."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(torch.float64).eval()


class ModelEngine:
    """An engine that runs a model over blocks allocated by the scheduler."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.model = make_model("kv_pool")
        self.device = allocate_storage(self.model, NUM_BLOCKS, BLOCK_SIZE)
        self.host = allocate_storage(self.model, NUM_HOST_BLOCKS, BLOCK_SIZE)
        self.sequences = PagedSequences(manager, self.device)

    def run(self, batch: list[tuple[Sequence, int]]) -> list[int]:
        requests = [request for request, _ in batch]
        starts = [request.num_computed_tokens for request in requests]
        cache = PagedCache(self.sequences, requests, [count for _, count in batch], gathers=False)
        with torch.no_grad():
            logits = self.model(**cache.make_inputs()).logits
        for request, start in zip(requests, starts, strict=True):
            request.num_computed_tokens = start  # the cache has advanced it; here the scheduler does that
        return [int(row[count - 1].argmax()) for row, (_, count) in zip(logits, batch, strict=True)]


def generate_dense(model: Any, request: Sequence) -> list[int]:
    input_ids = torch.tensor([request.all_token_ids[: request.num_prompt_tokens]])
    num_new_tokens = request.max_tokens - request.num_prompt_tokens
    mask = torch.ones_like(input_ids)
    output = model.generate(input_ids, attention_mask=mask, max_new_tokens=num_new_tokens, do_sample=False)
    return list(output[0].tolist())


def main() -> None:
    torch.set_num_threads(1)  # the tensors are tiny: more threads would be slower
    rng = random.Random(0)
    manager = KVCacheManager(BlockPool(NUM_BLOCKS, True, BLOCK_SIZE))
    swapper = BlockSwapper(manager, BlockPool(NUM_HOST_BLOCKS, True, BLOCK_SIZE, medium="CPU"))
    rule = PreemptionCost(prefill_tokens_per_s=1000, copy_bytes_per_s=1e7, block_bytes=3000)
    scheduler = Scheduler(manager, swapper, ModelEngine(manager), rule, token_budget=64, max_running=12)

    hasher = BlockHasher("sha256", block_size=BLOCK_SIZE)
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    requests = []
    for number in range(24):
        own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        request = Sequence(f"r{number}", prefixes[number % 3] + own, hasher, 30, int(number % 6 == 0))
        request.arrival_ms = float(number)
        scheduler.add(request)
        requests.append(request)
    num_steps = 0
    while scheduler.num_unfinished:
        scheduler.step()
        num_steps += 1

    dense = make_model("sdpa")
    num_equal = sum(request.all_token_ids == generate_dense(dense, request) for request in requests)
    print(f"24 prompts with 3 prefixes on {NUM_BLOCKS - 1} blocks of {BLOCK_SIZE} tokens")
    print(f"{num_steps:>5} forward passes")
    for what, count in sorted(scheduler.done.items()):
        print(f"{count:>5} {what}")
    print(f"{num_equal:>5} outputs equal the dense run, token by token")


if __name__ == "__main__":
    main()

# prints:
# 24 prompts with 3 prefixes on 40 blocks of 8 tokens
#   105 forward passes
#    41 blocks copied in
#    56 blocks copied out
#     4 freed, to be recomputed
#    23 swapped out
#  1000 tokens found in the cache
#  1281 tokens of admitted requests
#    24 outputs equal the dense run, token by token
