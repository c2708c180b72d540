import random

import pytest

from kv_pool.events.replay_server import ReplayBuffer


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_match_a_dict(seed):
    rng = random.Random(seed)
    first, capacity = rng.randrange(5), rng.randint(1, 8)
    buffer, kept, last = ReplayBuffer(capacity, first), {}, first - 1
    for _ in range(200):
        last += rng.randint(1, 3) if rng.random() < 0.2 else 1
        if rng.random() < 0.1:
            buffer.skip(last)
        else:
            kept[last] = b"%d" % last
            buffer.append(last, kept[last])
            kept = dict(list(kept.items())[-capacity:])
        start = rng.randint(max(0, last - 12), last + 2)
        assert buffer.list_from(start, 99) == [(n, payload) for n, payload in kept.items() if n >= start]
        assert buffer.has_all_from(start) == (start in kept or start > last)
