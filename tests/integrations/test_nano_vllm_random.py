"""Random sequences over a slow block manager and over ours, call by call the same."""

import random

import pytest
from integrations.made_sequence import MadeSequence

from kv_pool.core import invariants
from kv_pool.integrations.nano_vllm import BlockManager

NUM_STEPS = 400
# Few, so that the same tokens also come up behind different prefixes.
NUM_TOKEN_IDS = 3


class SlowBlockManager:
    """nano-vllm's rules as plainly as can be said: `eager` as in 2025, else as today.

    A prefix is the tuple of all tokens up to a block's end; no hashes, so no two prefixes are confused. A
    block that is reused forgets its prefix. Of several blocks with one prefix the youngest is found, and when
    that one forgets, the others are not found again.
    """

    def __init__(self, num_blocks, block_size, eager):
        self.block_size = block_size
        self.eager = eager
        self.free = list(range(num_blocks))
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.found = {}  # prefix -> block id

    def prefixes(self, seq):
        """The prefixes that end with a full block, shortest first."""
        ends = range(self.block_size, len(seq) + 1, self.block_size)
        return [tuple(seq.token_ids[:end]) for end in ends]

    def hits(self, seq):
        prefixes = self.prefixes(seq)
        if not self.eager:
            prefixes = prefixes[: seq.num_blocks - 1]
        hits = []
        for prefix in prefixes:
            if prefix not in self.found:
                break
            hits.append(self.found[prefix])
        return hits

    def cache(self, seq, first, end):
        for index in range(first, end):
            self.found[self.prefixes(seq)[index]] = seq.block_table[index]

    def take(self, seq):
        block_id = self.free.pop(0)
        self.found = {prefix: held for prefix, held in self.found.items() if held != block_id}
        self.references[block_id] = 1
        seq.block_table.append(block_id)

    def can_allocate(self, seq):
        if self.eager:
            return seq.num_blocks <= len(self.free)
        hits = self.hits(seq)
        num_needed = seq.num_blocks - sum(block_id not in self.free for block_id in hits)
        return len(hits) if num_needed <= len(self.free) else -1

    def allocate(self, seq, num_cached_blocks=None):
        hits = self.hits(seq)[:num_cached_blocks]
        for block_id in hits:
            if block_id in self.free:
                self.free.remove(block_id)
            self.references[block_id] += 1
        seq.block_table.extend(hits)
        while len(seq.block_table) < seq.num_blocks:
            self.take(seq)
        seq.num_cached_tokens = len(hits) * self.block_size
        if self.eager:
            self.cache(seq, len(hits), len(seq) // self.block_size)

    def can_append(self, seq):
        return len(seq.block_table) == seq.num_blocks or bool(self.free)

    def may_append(self, seq):
        if len(seq.block_table) < seq.num_blocks:
            self.take(seq)
        if self.eager and len(seq) % self.block_size == 0:
            self.cache(seq, seq.num_blocks - 1, seq.num_blocks)

    def hash_blocks(self, seq):
        num_computed_tokens = seq.num_cached_tokens + seq.num_scheduled_tokens
        self.cache(seq, seq.num_cached_tokens // self.block_size, num_computed_tokens // self.block_size)

    def deallocate(self, seq):
        while seq.block_table:
            block_id = seq.block_table.pop()
            self.references[block_id] -= 1
            if not self.references[block_id]:
                self.free.append(block_id)
        seq.num_cached_tokens = 0


class Workload:
    """Makes the same calls of both managers for two copies of each sequence, and compares all they leave."""

    def __init__(self, seed, eager):
        self.rng = rng = random.Random(seed)
        self.eager = eager
        self.block_size = rng.randint(1, 4)
        num_blocks = rng.randint(3, 20)
        self.slow = SlowBlockManager(num_blocks, self.block_size, eager)
        self.ours = BlockManager(num_blocks, self.block_size)
        self.max_tokens = num_blocks * self.block_size
        self.running = []  # pairs of a sequence of the slow manager and one of ours
        self.prompts = [[1]]
        self.num_hit_tokens = self.num_refused = 0

    def call(self, name, pair, *arguments):
        """Call a method of both managers; return its answer."""
        expected = getattr(self.slow, name)(pair[0], *arguments)
        found = getattr(self.ours, name)(pair[1], *arguments)
        assert (bool(found) if isinstance(expected, bool) else found) == expected
        assert pair[1].block_table == pair[0].block_table
        assert pair[1].num_cached_tokens == pair[0].num_cached_tokens
        return expected

    def draw_tokens(self, most):
        return [self.rng.randrange(NUM_TOKEN_IDS) for _ in range(self.rng.randint(0, most))]

    def admit(self):
        prompt = self.rng.choice(self.prompts)
        prompt = prompt[: self.rng.randint(1, len(prompt))] + self.draw_tokens(2 * self.block_size)
        prompt = prompt[: self.max_tokens]
        pair = [MadeSequence(prompt, self.block_size) for _ in range(2)]
        answer = self.call("can_allocate", pair)
        if answer is False or (not self.eager and answer == -1):
            self.num_refused += 1
            return
        if not self.eager and len(self.slow.free) >= pair[0].num_blocks:
            answer = self.rng.randint(0, answer)  # fewer hits than there are
        self.call("allocate", pair, *([] if self.eager else [answer]))
        self.num_hit_tokens += pair[0].num_cached_tokens
        self.running.append(pair)

    def compute(self, pair):
        """Compute some of the tokens, of which the scheduler of 2025 says nothing."""
        num_tokens = self.rng.randint(0, len(pair[0]) - pair[0].num_cached_tokens)
        for seq in pair:
            seq.num_scheduled_tokens = num_tokens
        self.call("hash_blocks", pair)
        for seq in pair:
            seq.num_cached_tokens += num_tokens

    def step(self):
        if not self.running or self.rng.random() < 0.3:
            self.admit()
            return
        pair = self.rng.choice(self.running)
        if self.rng.random() < 0.3:
            self.prompts.append(list(pair[0].token_ids))
            self.call("deallocate", pair)
            self.running.remove(pair)
        elif not self.eager and pair[0].num_cached_tokens < len(pair[0]):
            self.compute(pair)
        elif len(pair[0]) < self.max_tokens:
            token_id = self.rng.randrange(NUM_TOKEN_IDS)
            for seq in pair:
                seq.append_token(token_id)
            if self.call("can_append", pair):
                self.call("may_append", pair)
            else:
                self.call("deallocate", pair)
                self.running.remove(pair)

    def check(self):
        assert self.ours.free_block_ids == self.slow.free
        cached = {block.block_id - 1 for block in self.ours.block_pool.blocks if block.block_hash}
        assert cached == set(self.slow.found.values())
        invariants.check(self.ours.block_pool)


@pytest.mark.parametrize("eager", [False, True], ids=["today", "2025"])
@pytest.mark.parametrize("first_seed", range(0, 60, 20))
def test_random_calls_agree_with_a_slow_block_manager(first_seed, eager):
    num_hit_tokens = num_refused = 0
    for seed in range(first_seed, first_seed + 20):
        workload = Workload(seed, eager)
        for _ in range(NUM_STEPS):
            workload.step()
            workload.check()
        num_hit_tokens += workload.num_hit_tokens
        num_refused += workload.num_refused
    assert num_hit_tokens > 1_000
    assert num_refused > 100
