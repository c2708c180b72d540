"""Queued batches, compared with a list; live batches that were replayed."""

import random

import pytest

from kv_pool.events.queued_batches import QueuedBatches, ReplayedBatches, make_fingerprint


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_match_a_list(seed):
    rng = random.Random(seed)
    held, expected = QueuedBatches(max_batches=6, max_bytes=100), []
    for sequence in range(2000):
        match rng.choice(["append", "append", "append", "put_back", "pop", "clear"][: rng.randint(4, 6)]):
            case "append":
                payload = bytes(rng.choice([rng.randrange(60), rng.randrange(160)]))
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


def test_new_incarnation_forgets_all_batches():
    batches = ReplayedBatches()
    batches.add(3, make_fingerprint(b"three"))
    batches.passed = 5
    batches.last_live = 4
    batches.begin_incarnation()
    assert not batches.contains(3, b"three")
    assert batches.passed is None
    batches.passed = 4
    assert batches.contains(4, b"x")


def test_oldest_fingerprints_are_dropped():
    batches = ReplayedBatches()
    for sequence in range(100_001):
        batches.add(sequence, make_fingerprint(b"x"))
    assert (batches.contains(0, b"x"), batches.contains(1, b"x")) == (False, True)
