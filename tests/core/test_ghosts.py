"""`Ghosts` against a slow model."""

import random

import pytest

from kv_pool.core.cache_policy import Ghosts


class SlowGhosts:
    """A dict of sizes in the order of insertion."""

    def __init__(self, max_blocks):
        self.max_blocks = max_blocks
        self.sizes = {}

    def add(self, key, num_blocks):
        self.sizes[key] = min(num_blocks, self.max_blocks)
        dropped = []
        while sum(self.sizes.values()) > self.max_blocks:
            dropped.append(self.drop_oldest())
        return dropped

    def pop(self, key):
        return self.sizes.pop(key, 0)

    def shrink(self, num_blocks):
        while self.sizes and sum(self.sizes.values()) > num_blocks:
            self.drop_oldest()

    def drop_oldest(self):
        oldest = next(iter(self.sizes), None)
        self.sizes.pop(oldest, None)
        return oldest


@pytest.mark.parametrize("seed", range(8))
def test_ghosts_equal_a_slow_model(seed):
    choose = random.Random(seed)
    max_blocks = choose.choice([0, 1, 7, 40, 300])
    ghosts, slow = Ghosts(max_blocks), SlowGhosts(max_blocks)
    for _ in range(3000):
        key = b"%d" % choose.randrange(choose.choice([4, 60, 2000]))
        call = choose.choices(["add", "pop", "shrink", "drop_oldest"], [20, choose.choice([1, 20]), 1, 1])[0]
        arguments = {
            "add": (key, choose.randint(1, 6)),
            "pop": (key,),
            "shrink": (choose.randint(0, max_blocks),),
            "drop_oldest": (),
        }[call]
        assert getattr(ghosts, call)(*arguments) == getattr(slow, call)(*arguments)
        assert (key in ghosts) == (key in slow.sizes)
        assert (len(ghosts), ghosts.num_blocks) == (len(slow.sizes), sum(slow.sizes.values()))
