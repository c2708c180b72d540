"""The bytes of a life: the expected value of each token's slot, and the bytes promised under each key.

A value depends on all tokens up to its own: equal prompts have equal values at both nodes, and bytes
in the wrong place are noticed. The value of a slot differs between KV cache groups.
"""

import random
import zlib
from collections import Counter

import numpy as np
from adapter.made_pool import BreakingCopy

from kv_pool import BlockHasher, Request
from kv_pool.core.block_keys import make_block_hash_with_group_id, make_external_block_hash
from kv_pool.errors import CorruptedPoolError, KVPoolError
from kv_pool.storage.block_storage import BlockStorage

BLOCK_SIZE = 4
HASHER = BlockHasher("sha256", "lives", BLOCK_SIZE)
MOST_TOKENS = 44


class World:
    """State shared by both nodes: randomness, the time, the prompts, and the bytes promised under each key.

    Attributes:
        blocks: of all prompts, by the hash in events: the hash of the block before, and the tokens.
        travelling: sequences being moved, by id.
        is_calm: no faults occur between the nodes.
        finding: an exception raised where the product handles exceptions; the next check raises it.
    """

    def __init__(self, seed, num_groups):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.num_groups = num_groups
        self.tally = Counter()
        self.promised = {}
        self.blocks = {}
        self.travelling = {}
        self.is_calm = False
        self.finding = None
        self.num_made = 0
        self.prompts = [self.draw_tokens(self.rng.randint(8, 30)) for _ in range(5)]

    def read_clock(self):
        return self.now

    def draw_tokens(self, count):
        return [self.rng.randrange(4) for _ in range(count)]

    def draw_prompt(self):
        prompt = self.rng.choice(self.prompts)
        return prompt[: self.rng.randint(1, len(prompt))] + self.draw_tokens(self.rng.randint(1, 4))

    def make_sequence(self, tokens):
        self.num_made += 1
        return Sequence(self, self.num_made, tokens)

    def promise(self, sequence):
        parent = None
        for position, block_hash in enumerate(sequence.request.block_hashes):
            name = make_external_block_hash(block_hash)
            start = position * BLOCK_SIZE
            tokens = sequence.request.all_token_ids[start : start + BLOCK_SIZE]
            self.blocks[name] = parent, tuple(tokens)
            parent = name
            row = sequence.values[position * BLOCK_SIZE : (position + 1) * BLOCK_SIZE]
            for group_id in range(self.num_groups):
                key = make_block_hash_with_group_id(block_hash, group_id)
                if key not in self.promised:
                    self.promised[key] = np.array(row, np.uint64) + np.uint64(group_id)

    def note_error(self, error):
        """Record the error of a failed pull, unless it is an expected one."""
        if not isinstance(error, KVPoolError) or isinstance(error, CorruptedPoolError):
            self.finding = self.finding or error

    def chance(self, share):
        return self.rng.random() < share


class Sequence:
    """A request, and the value of each of its tokens."""

    def __init__(self, world, number, tokens):
        self.world = world
        self.request = Request(str(number), tokens, HASHER)
        self.values = []
        self._note_tokens()

    @property
    def name(self):
        return self.request.request_id

    @property
    def num_left(self):
        return self.request.num_tokens - self.request.num_computed_tokens

    def append(self, tokens):
        self.request.append_output_token_ids(tokens)
        self._note_tokens()

    def _note_tokens(self):
        value = self.values[-1] // 8 - 1 if self.values else 0
        for position in range(len(self.values), self.request.num_tokens):
            token = self.request.all_token_ids[position]
            value = zlib.crc32(b"%d %d" % (position, token), value)
            self.values.append(value * 8 + 8)
        self.world.promise(self)


class Side:
    """A pool and the bytes of its blocks; `copy.num_good` makes copies fail."""

    def __init__(self, pool, num_rows):
        self.pool = pool
        self.kv = np.zeros((num_rows, BLOCK_SIZE), np.uint64)
        self.copy = BreakingCopy()
        self.storage = BlockStorage.wrap_state([self.kv], self.copy)

    def write(self, block_ids, sequence, start, end, group_id=0):
        """Write the values of tokens `start` to `end` to the slots of a block table of ids, 0 for none."""
        for position in range(start, end):
            block_id = block_ids[position // BLOCK_SIZE]
            if block_id:
                self.kv[block_id, position % BLOCK_SIZE] = sequence.values[position] + group_id

    def check(self, block_ids, sequence, start, end, group_id=0):
        """Read the same slots."""
        for position in range(start, end):
            block_id = block_ids[position // BLOCK_SIZE]
            found = int(self.kv[block_id, position % BLOCK_SIZE])
            if not block_id or found != sequence.values[position] + group_id:
                raise AssertionError(
                    f"sequence {sequence.name}, group {group_id}: token {position} is not in block {block_id}"
                )
