"""Blocks of one event share a span, and are separated when needed."""

import random

import pytest
from events.made_events import made, removed, snap, stored

from kv_pool.events.invariants import Reader, check_knowledge
from kv_pool.events.spans import (
    MAX_GROWN_BLOCKS,
    MIN_TRIMMED_BLOCKS,
    join_tokens,
    pack_tokens,
    unpack_tokens,
)
from kv_pool.events.stream_state import StreamState


def list_spans(state):
    """Return the resident hashes of each span in the only place."""
    (blocks,) = state.resident.places.values()
    return [
        [block_hash for block_hash in span.hashes if blocks.held.values.get(block_hash) is span]
        for shard in blocks.shards
        for span in shard.values()
    ]


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 65535, 65536])
def test_packed_tokens_can_be_unpacked_and_joined(num_tokens):
    token_ids = [number * 7 for number in range(num_tokens)]
    packed = pack_tokens(token_ids)
    assert unpack_tokens(packed) == token_ids
    joined = join_tokens(packed, num_tokens, pack_tokens([2**40, 5]), 2)
    assert unpack_tokens(joined) == [*token_ids, 2**40, 5]
    assert unpack_tokens(join_tokens(pack_tokens([5]), 1, joined, num_tokens + 2)) == [
        5,
        *token_ids,
        2**40,
        5,
    ]


def test_values_that_msgpack_cannot_encode_are_not_packed():
    assert pack_tokens([object()]) is None
    assert pack_tokens([2**64]) is None


def test_single_blocks_in_sequence_share_a_span():
    numbers = range(1, 2 * MAX_GROWN_BLOCKS + 2)
    state = made(*(stored([number], number - 1 or None) for number in numbers))
    sizes = sorted(map(len, list_spans(state)))
    assert sizes == [1, MAX_GROWN_BLOCKS, MAX_GROWN_BLOCKS]
    assert snap(state) == ["clear", "> " + " ".join(map(str, numbers))]


def test_span_drops_fields_of_blocks_once_most_are_removed():
    numbers = list(range(1, 4 * MIN_TRIMMED_BLOCKS + 1))
    state = made(stored(numbers))
    kept = numbers[:8]
    state.apply([removed(*reversed(numbers[8:]))])
    (blocks,) = state.resident.places.values()
    (span,) = {blocks.held.values[number] for number in kept}
    assert span.hashes == tuple(kept)
    assert unpack_tokens(span.tokens) == [token for n in kept for token in (10 * n, 10 * n + 1)]
    assert snap(state) == ["clear", "> " + " ".join(map(str, kept))]


def test_token_ids_are_lists_unless_packing_is_allowed():
    state = StreamState()
    assert state.apply([stored(range(1, 200))])[0].token_ids == stored(range(1, 200)).token_ids


# ---- random histories ----------------------------------------------------------------------------------


class Forest:
    """Random sequences that fork, and their resident blocks."""

    def __init__(self, rng, longest):
        self.rng = rng
        self.longest = longest
        self.resident = []
        self.next = 1

    def grow(self):
        """Return a store of new blocks after any earlier block, some of them copies of resident ones."""
        rng = self.rng
        num_blocks = rng.choice([1, 1, rng.randint(1, 8), rng.randint(1, self.longest)])
        parent = rng.choice([None, rng.randint(1, self.next), *self.resident[-1:]])
        hashes = list(range(self.next, self.next + num_blocks))
        self.next += num_blocks
        if rng.random() < 0.2 and self.resident:
            again = rng.sample(self.resident, min(len(self.resident), rng.randint(1, 5)))
            position = rng.randint(0, len(hashes))
            hashes[position:position] = again
        self.resident += hashes
        return stored(hashes, parent)

    def shrink(self):
        """Return removals of one hash each: from the end, the front, or anywhere."""
        rng = self.rng
        num_blocks = min(len(self.resident), rng.randint(1, 2 * self.longest))
        if rng.random() < 0.4:
            gone = self.resident[-num_blocks:][::-1]
            del self.resident[-num_blocks:]
        elif rng.random() < 0.5:
            gone = self.resident[:num_blocks]
            del self.resident[:num_blocks]
        else:
            rng.shuffle(self.resident)
            gone = self.resident[-num_blocks:]
            del self.resident[-num_blocks:]
        if rng.random() < 0.1:
            gone.append(10**9)
        return [removed(number) for number in gone]


@pytest.mark.parametrize("seed", range(60))
def test_random_sequences_leave_readers_with_resident_blocks(seed):
    rng = random.Random(seed)
    forest = Forest(rng, rng.choice([5, 60, 700]))
    state = StreamState()
    reader, late = Reader(), Reader()
    for _ in range(60):
        batch = [forest.grow()] if rng.random() < 0.6 or not forest.resident else forest.shrink()
        if rng.random() < 0.3:
            batch.append(forest.grow())
        sent = state.apply(batch)
        for one in (reader, late):
            one.read(sent)
        if rng.random() < 0.1:
            late = Reader()
            late.read(state.take_snapshot()[1])
        assert sorted({number for _, number, _ in state.resident}) == sorted(set(forest.resident))
        assert {number: copies for _, number, copies in state.resident} == {
            number: forest.resident.count(number) for number in set(forest.resident)
        }
        check_knowledge(state, reader, late)
    state.apply([removed(number) for number in forest.resident])
    (blocks,) = state.resident.places.values()
    assert not blocks.held.values
    assert not blocks.children
    assert not blocks.tails
    assert not blocks.held.copies
    assert not any(blocks.shards)
