"""Queued batches, compared with a list."""

import random

import pytest

from kv_pool.events.queued_batches import QueuedBatches


def test_oldest_batches_are_dropped_beyond_the_byte_bound():
    held = QueuedBatches(max_batches=100, max_bytes=10)
    for sequence in range(5):
        held.append(sequence, b"four")
    assert (len(held), held.num_bytes) == (2, 8)
    assert held.pop() == (3, b"four")


def test_batch_larger_than_the_bound_is_kept_alone():
    held = QueuedBatches(max_batches=100, max_bytes=10)
    held.append(0, b"four")
    held.append(1, bytes(1000))
    assert held.pop() == (1, bytes(1000))
    assert (len(held), held.num_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_match_a_list(seed):
    rng = random.Random(seed)
    held, expected = QueuedBatches(max_batches=6, max_bytes=100), []
    for sequence in range(2000):
        match rng.choice(["append", "append", "append", "put_back", "pop", "clear"][: rng.randint(4, 6)]):
            case "append":
                payload = bytes(rng.randrange(60))
                held.append(sequence, payload)
                expected.append((sequence, payload))
                while len(expected) > 6 or (sum(len(one) for _, one in expected) > 100 and len(expected) > 1):
                    expected.pop(0)
            case "put_back" if len(expected) < 6:
                held.put_back(sequence, b"back")
                expected.insert(0, (sequence, b"back"))
            case "pop" if expected:
                assert held.first == expected[0]
                assert held.pop() == expected.pop(0)
            case "clear" if rng.random() < 0.2:
                held.clear()
                expected.clear()
        assert len(held) == len(expected)
        assert held.num_bytes == sum(len(payload) for _, payload in expected)
