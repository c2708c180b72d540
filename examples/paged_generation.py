"""Continuous batching of many prompts on a small Llama whose keys and values are in the pool's blocks.

Sequences share the blocks of common prefixes, are forked, evicted and resumed, and migrate between two
pools: one on a GPU, if available, and one on the CPU. Between steps the pools are compacted a few blocks at a
time, and sometimes a run of blocks is cleared, as for a transfer. Each output is compared with the output of
transformers with its own cache.

Run it: pip install '.[transformers]' && python examples/paged_generation.py
"""

import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

try:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"this example needs torch and transformers ({error}): pip install '.[transformers]'")

from kv_pool import BlockHasher, KVCacheManager, Request, RequestId
from kv_pool.contiguous import Defragmenter, RunBlockPool
from kv_pool.integrations.transformers import PagedCache, PagedSequences, allocate_storage

BLOCK_SIZE, NUM_BLOCKS, MAX_RUNNING, NUM_NEW_TOKENS, VOCABULARY = 8, 41, 8, 24, 128
RUN_LENGTH, MAX_MOVES = 4, 3

torch.set_num_threads(1)  # the tensors are tiny: more threads would be slower
rng = random.Random(0)
hasher = BlockHasher("sha256", block_size=BLOCK_SIZE)
done: Counter[str] = Counter()


def make_model(attention: str, device: str) -> Any:
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
    return LlamaForCausalLM(config).to(device, torch.float64).eval()


class Engine:
    """One device: its model, its pool, the bytes of its blocks, and its running sequences."""

    def __init__(self, device: str) -> None:
        self.model = make_model("kv_pool", device)
        self.pool = RunBlockPool(NUM_BLOCKS, True, BLOCK_SIZE)
        self.sequences = PagedSequences(
            KVCacheManager(self.pool), allocate_storage(self.model, NUM_BLOCKS, BLOCK_SIZE), RUN_LENGTH
        )
        self.defragmenter = Defragmenter(self.sequences, interval_s=0, max_moves=MAX_MOVES)
        self.running: list[Request] = []

    def admit(self, waiting: list[Request]) -> None:
        while waiting and len(self.running) < MAX_RUNNING:
            num_cached_tokens = self.sequences.admit(waiting[0])
            if num_cached_tokens is None:
                break
            done["tokens found in the cache on admission"] += num_cached_tokens
            done["tokens computed on admission"] += waiting[0].num_tokens - num_cached_tokens
            self.running.append(waiting.pop(0))

    def step(self, waiting: list[Request]) -> None:
        """Compute prompts and single tokens in one pass; evict sequences if too few blocks are free."""
        for request in list(self.running):
            if request not in self.running:
                continue
            num_tokens = request.num_tokens - request.num_computed_tokens
            while not self.sequences.reserve(request, num_tokens):
                last = self.running.pop()  # the latest sequence is evicted first, so that the others advance
                self.sequences.free(last)
                waiting.append(last)
                done["sequences evicted and resumed"] += 1
                if last is request:
                    break
        if not self.running:
            return
        num_new_tokens = [request.num_tokens - request.num_computed_tokens for request in self.running]
        cache = PagedCache(self.sequences, self.running, num_new_tokens, gathers=False)
        with torch.no_grad():
            logits = self.model(**cache.make_inputs()).logits
        for row, count, request in zip(logits, num_new_tokens, list(self.running), strict=True):
            request.append_output_token_ids([int(row[count - 1].argmax())])
            if request.num_tokens >= request.num_prompt_tokens + NUM_NEW_TOKENS:
                self.running.remove(request)
                self.sequences.free(request)
        done["forward passes"] += 1

    def fork(self) -> list[Request]:
        """Fork a sequence with another next token; return [] if it has no computed tokens."""
        parent = rng.choice(self.running)
        computed = parent.all_token_ids[: parent.num_computed_tokens]
        child = Request(
            RequestId(f"fork {done['sequences forked']}"), [*computed, rng.randrange(VOCABULARY)], hasher
        )
        if not computed:
            return []
        self.sequences.fork(parent, child)
        self.running.append(child)
        done["sequences forked"] += 1
        return [child]

    def migrate(self, other: "Engine") -> None:
        request = rng.choice(self.running)
        if len(other.running) < MAX_RUNNING and self.sequences.migrate(request, other.sequences):
            self.running.remove(request)
            other.running.append(request)
            done["sequences migrated"] += 1

    def compact(self) -> None:
        """Move blocks between two steps. Each step reads the block ids again."""
        done["blocks moved between two steps"] += self.defragmenter.step()

    def take_run(self) -> None:
        """Allocate adjacent blocks, as for a transfer, and release them at once."""
        if self.pool.get_num_free_blocks() < RUN_LENGTH:
            return
        run = self.sequences.take_run(RUN_LENGTH)
        if run is not None:
            done["runs of 4 blocks taken"] += 1
            self.pool.free_blocks(run)


def draw_tokens(num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def generate_dense(model: Any, prompt: Sequence[int]) -> list[int]:
    """Return the output for a prompt, computed with transformers' own cache."""
    input_ids = torch.tensor([prompt])
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
    )
    return list(output[0, len(prompt) :].tolist())


prefixes = [draw_tokens(40) for _ in range(3)]
requests = [
    Request(RequestId(f"r{number}"), [*prefixes[number % 3], *draw_tokens(rng.randint(1, 12))], hasher)
    for number in range(24)
]
waiting = list(requests)
engines = [Engine("cuda:0" if torch.cuda.is_available() else "cpu"), Engine("cpu")]
while waiting or any(engine.running for engine in engines):
    for engine, other in (engines, engines[::-1]):
        engine.admit(waiting)
        engine.step(waiting)
        if engine.running and done["forward passes"] % 5 == 0 and done["sequences forked"] < 8:
            requests += engine.fork()
        if engine.running and done["forward passes"] % 3 == 0:
            engine.migrate(other)
        engine.compact()
        if done["forward passes"] % 7 == 0:
            engine.take_run()

dense = make_model("sdpa", "cpu")
num_equal = 0
for request in requests:
    prompt = request.all_token_ids[: request.num_prompt_tokens]
    num_equal += request.all_token_ids[request.num_prompt_tokens :] == generate_dense(dense, prompt)

print(f"24 prompts with 3 prefixes on two pools of {NUM_BLOCKS - 1} blocks of {BLOCK_SIZE} tokens")
for what, count in done.items():
    print(f"{count:>5} {what}")
print(f"{len(requests) * NUM_NEW_TOKENS:>5} tokens generated by {len(requests)} sequences")
print(f"{num_equal:>5} sequences equal the dense run, token by token")

# prints:
# 24 prompts with 3 prefixes on two pools of 40 blocks of 8 tokens
#  1928 tokens found in the cache on admission
#  1167 tokens computed on admission
#   131 forward passes
#   121 blocks moved between two steps
#    23 sequences migrated
#    35 sequences evicted and resumed
#     8 sequences forked
#     7 runs of 4 blocks taken
#   768 tokens generated by 32 sequences
#    32 sequences equal the dense run, token by token
