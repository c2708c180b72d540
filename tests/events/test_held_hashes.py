"""Held hashes, compared with a list of copies."""

import random

import pytest

from kv_pool.events.held_hashes import ABSENT, HeldHashes


class SlowHashes:
    """Each copy of a hash in order of arrival; the value of a hash is that of its first copy."""

    def __init__(self):
        self.copies = []

    def value_of(self, block_hash):
        return next((value for held, value in self.copies if held == block_hash), ABSENT)

    def store(self, hashes, values, counts_copies):
        new = []
        for position, (block_hash, value) in enumerate(zip(hashes, values, strict=True)):
            known = self.value_of(block_hash)
            if known is ABSENT:
                new.append(position)
            if known is ABSENT or counts_copies:
                self.copies.append((block_hash, value if known is ABSENT else known))
        return new

    def remove(self, hashes):
        gone = []
        for block_hash in hashes:
            value = self.value_of(block_hash)
            if value is not ABSENT:
                self.copies.remove((block_hash, value))
            if self.value_of(block_hash) is ABSENT:
                gone.append((block_hash, value))
        return gone


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_agree_with_a_list_of_copies(seed):
    rng = random.Random(seed)
    held, slow = HeldHashes(), SlowHashes()
    for number in range(2_000):
        hashes = rng.choices(range(12), k=rng.choice([0, 1, 1, 2, 3, 5]))
        if rng.random() < 0.5:
            values = [f"{number}.{position}" for position in range(len(hashes))]
            counts_copies = rng.random() < 0.7
            positions = held.store(hashes, values, counts_copies)
            new = slow.store(hashes, values, counts_copies)
            assert new == (list(range(len(hashes))) if positions is None else positions)
        else:
            gone, values = held.remove(hashes)
            assert list(zip(gone, values, strict=True)) == slow.remove(hashes)
        counts = {block_hash: 0 for block_hash, _ in slow.copies}
        for block_hash, _ in slow.copies:
            counts[block_hash] += 1
        assert dict(held) == counts
        assert held.values == {block_hash: slow.value_of(block_hash) for block_hash in counts}
        assert len(held) == len(counts)
