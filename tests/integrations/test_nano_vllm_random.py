"""One random workload over the slow block manager and over ours, step by step the same."""

import random

import pytest
from integrations.made_sequence import MadeSequence
from integrations.slow_engine import SlowBlockManager, SmallScheduler

from kv_pool.core import invariants
from kv_pool.integrations.nano_vllm import BlockManager

NUM_STEPS = 150
# Few, so that the same tokens also come up behind different prefixes.
NUM_TOKEN_IDS = 3


class Workload:
    """Draws the same for either manager, as long as both do the same."""

    def __init__(self, seed, eager, make_manager):
        self.rng = rng = random.Random(seed)
        self.block_size = rng.randint(1, 4)
        num_blocks = rng.randint(3, 20)
        num_slots = num_blocks * self.block_size
        max_num_tokens = rng.randint(num_slots if eager else 1, 2 * num_slots)
        self.manager = make_manager(num_blocks, self.block_size)
        self.scheduler = SmallScheduler(self.manager, eager, rng.randint(1, 6), max_num_tokens)
        self.max_seq_tokens = num_slots
        self.prompts = [[1]]
        self.num_hit_tokens = 0

    def step(self):
        if self.rng.random() < 0.4:
            self.add()
        seqs, is_prefill = self.scheduler.schedule()
        if is_prefill:
            self.num_hit_tokens += sum(seq.num_cached_tokens for seq in seqs)
        done = [
            (seq.seq_id, seq.num_cached_tokens, seq.num_scheduled_tokens, list(seq.block_table))
            for seq in seqs
        ]
        self.scheduler.finish_step(seqs, [self.rng.randrange(NUM_TOKEN_IDS) for _ in seqs])
        self.prompts += [list(seq.token_ids) for seq in seqs if len(seq) >= seq.max_num_tokens]
        return (
            is_prefill,
            done,
            [seq.seq_id for seq in self.scheduler.waiting],
            [seq.seq_id for seq in self.scheduler.running],
        )

    def add(self):
        prompt = list(self.rng.choice(self.prompts))
        prompt = prompt[: self.rng.randint(1, len(prompt))]
        prompt += [self.rng.randrange(NUM_TOKEN_IDS) for _ in range(self.rng.randint(0, 2 * self.block_size))]
        prompt = prompt[: self.max_seq_tokens - 1] or [1]
        seq = MadeSequence(prompt, self.block_size, seq_id=self.rng.getrandbits(32))
        seq.max_num_tokens = self.rng.randint(len(prompt) + 1, max(len(prompt) + 1, self.max_seq_tokens))
        self.prompts.append(prompt)
        self.scheduler.waiting.append(seq)


@pytest.mark.parametrize("eager", [False, True], ids=["today", "2025"])
@pytest.mark.parametrize("first_seed", range(0, 100, 20))
def test_random_workloads_agree_with_a_slow_block_manager(first_seed, eager):
    num_hit_tokens = 0
    for seed in range(first_seed, first_seed + 20):
        slow = Workload(seed, eager, lambda *sizes: SlowBlockManager(*sizes, eager))
        ours = Workload(seed, eager, BlockManager)
        for number in range(NUM_STEPS):
            expected = slow.step()
            assert ours.step() == expected, (seed, number)
            assert list(ours.manager.free_block_ids) == slow.manager.free, (seed, number)
            cached = {block.block_id - 1 for block in ours.manager.block_pool.blocks if block.block_hash}
            assert cached == set(slow.manager.found.values()), (seed, number)
            invariants.check(ours.manager.block_pool)
        num_hit_tokens += ours.num_hit_tokens
    assert num_hit_tokens > 1_000
