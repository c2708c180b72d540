import random

import pytest

from kv_pool.events.replay_server import ReplayBuffer


def sequences_from(buffer, start):
    return [sequence for sequence, _ in buffer.list_from(start, 99)]


def test_last_sequence_starts_one_below_the_first():
    buffer = ReplayBuffer(3, 100)
    assert (buffer.last_sequence, buffer.list_from(0, 9)) == (99, [])
    assert buffer.has_all_from(100)
    assert not buffer.has_all_from(99)


def test_oldest_batch_is_dropped_first():
    buffer = ReplayBuffer(3, 0)
    for sequence in range(5):
        buffer.append(sequence, b"%d" % sequence)
    assert buffer.list_from(0, 9) == [(2, b"2"), (3, b"3"), (4, b"4")]
    assert [buffer.has_all_from(start) for start in range(6)] == [False, False, True, True, True, True]


def test_hole_is_not_listed_but_counts_as_sent():
    buffer = ReplayBuffer(3, 0)
    buffer.append(0, b"")
    buffer.leave_hole(2)
    assert buffer.last_sequence == 2
    assert [buffer.has_all_from(start) for start in range(4)] == [True, False, False, True]
    buffer.append(3, b"")
    assert sequences_from(buffer, 1) == [3]


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_match_a_dict(seed):
    rng = random.Random(seed)
    first, capacity = rng.randrange(5), rng.randint(1, 8)
    buffer, kept, last = ReplayBuffer(capacity, first), {}, first - 1
    for _ in range(200):
        last += rng.randint(1, 3) if rng.random() < 0.2 else 1
        if rng.random() < 0.1:
            buffer.leave_hole(last)
        else:
            kept[last] = b"%d" % last
            buffer.append(last, kept[last])
            kept = dict(list(kept.items())[-capacity:])
        start = rng.randint(max(0, last - 12), last + 2)
        assert buffer.list_from(start, 99) == [(n, payload) for n, payload in kept.items() if n >= start]
        assert buffer.has_all_from(start) == (start in kept or start > last)
