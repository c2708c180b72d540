"""Random writes, moves, copies and resizes on a storage and on a slow model that stores tokens in a dict."""

import random

import numpy as np
import pytest
from storage.made_storage import BLOCK_AXES, draw_moves

from kv_pool.storage import KVStorage

BLOCK_SIZE, NUM_LAYERS, HEAD_SIZE = 4, 2, 2
STEPS = 40


class SlowModel:
    """A dict {(layer, slot): (key, value)} of tuples of numbers; unwritten slots hold zeros."""

    def __init__(self, heads, has_values):
        self.zeros = (0.0,) * (heads * HEAD_SIZE)
        self.has_values = has_values
        self.tokens = {}

    def write(self, layer, slot, key, value):
        self.tokens[layer, slot] = key, value

    def read(self, layer, slot):
        return self.tokens.get((layer, slot), (self.zeros, self.zeros if self.has_values else None))

    def move(self, source, target):
        for layer in range(NUM_LAYERS):
            for offset in range(BLOCK_SIZE):
                token = self.read(layer, source * BLOCK_SIZE + offset)
                self.tokens[layer, target * BLOCK_SIZE + offset] = token

    def shrink(self, num_blocks):
        self.tokens = {at: token for at, token in self.tokens.items() if at[1] < num_blocks * BLOCK_SIZE}


def flatten(tensor, row):
    return None if tensor is None else tuple(tensor[row].ravel().tolist())


@pytest.mark.parametrize("seed", range(4), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_random_calls_agree_with_a_slow_model(layout, seed):
    rng = random.Random(f"{layout} {seed}")
    heads = 1 if layout == "L|BND" else rng.choice([1, 3])
    storage = KVStorage.allocate(8, BLOCK_SIZE, NUM_LAYERS, heads, HEAD_SIZE, "float32", layout=layout)
    model = SlowModel(heads, storage.has_values)
    drawn = iter(np.arange(1e6, dtype=np.float32))

    def draw(num_tokens):
        count = num_tokens * heads * HEAD_SIZE
        return np.fromiter(drawn, np.float32, count).reshape(num_tokens, heads, HEAD_SIZE)

    for _ in range(STEPS):
        step = rng.choice(["write", "write", "move", "bytes", "resize"])
        if step == "write":
            layer = rng.randrange(NUM_LAYERS)
            slots = rng.sample(range(storage.num_slots), rng.randint(0, min(6, storage.num_slots)))
            key, value = draw(len(slots)), draw(len(slots)) if storage.has_values else None
            storage.write(layer, slots, key, value)
            for row, slot in enumerate(slots):
                model.write(layer, slot, flatten(key, row), flatten(value, row))
        elif step == "move" and storage.num_blocks > 1:
            moves = draw_moves(rng.random(), storage.num_blocks)
            storage.apply_moves(moves)
            for source, target in moves:
                model.move(source, target)
        elif step == "bytes":
            source, target = rng.randrange(storage.num_blocks), rng.randrange(storage.num_blocks)
            storage.write_block(target, storage.read_block(source))
            model.move(source, target)
        elif step == "resize":
            num_blocks = rng.randint(1, 12)
            storage.resize(num_blocks)
            model.shrink(num_blocks)
        for layer in range(NUM_LAYERS):
            key, value = storage.read(layer, np.arange(storage.num_slots))
            found = [(flatten(key, slot), flatten(value, slot)) for slot in range(storage.num_slots)]
            assert found == [model.read(layer, slot) for slot in range(storage.num_slots)], step
