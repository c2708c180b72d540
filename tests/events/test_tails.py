"""An inner block of a prefix is evicted and computed again: which readers find the blocks after it."""

import random

import pytest
from events.made_events import removed, send, stored

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.core.kv_events import BlockRemoved, BlockStored
from kv_pool.events import invariants
from kv_pool.events.chains import MAX_TAIL_BLOCKS
from kv_pool.events.invariants import Reader
from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.stream_state import StreamState

BLOCK_SIZE = 4


def test_blocks_after_a_restored_block_are_announced_again():
    """Only the hole used to be filled: readers that had hidden the blocks after it did not restore them."""
    state = StreamState()
    send(state, stored([1, 2, 3, 4]))
    assert send(state, removed(2)) == ["- 2"]
    assert send(state, stored([2], parent=1)) == ["- 3 4", "1 > 2 3 4"]
    assert send(state, removed(4), removed(3), removed(2)) == ["- 4 3 2"]
    assert send(state, stored([2, 3], parent=1)) == ["1 > 2 3"]


def test_a_sequence_that_grows_behind_a_hole_is_announced_again():
    """The span that grew was taken as whole, so the blocks behind the hole were not."""
    state = StreamState()
    send(state, stored([1, 2, 3]), removed(2), stored([4], parent=3), stored([5], parent=4))
    assert send(state, stored([2], parent=1)) == ["- 3 4 5", "1 > 2 3 4 5"]


def test_tails_require_a_state_with_tokens():
    state = StreamState(keeps_token_ids=False)
    send(state, stored([1, 2, 3]), removed(1))
    assert send(state, stored([1])) == ["> 1"]


def test_number_of_blocks_announced_again_is_bounded():
    state = StreamState()
    send(state, stored(range(1, 5_000)), removed(1))
    removal, *stores = state.apply([stored([1])])
    assert len(removal.block_hashes) == MAX_TAIL_BLOCKS
    assert [one for store in stores for one in store.block_hashes] == [1, *removal.block_hashes]


def test_thousand_branches_are_announced_again_parents_first():
    state, reader = StreamState(), Reader()
    for number in range(2, 600):
        reader.read(state.apply([stored([number, 1000 + number], parent=1)]))
    sent = state.apply([stored([1])])
    invariants.check_events(sent, reader)
    reader.read(sent)
    assert len(sent) == 1 + 512
    assert len(sent[0].block_hashes) == MAX_TAIL_BLOCKS
    invariants.check_knowledge(state, reader)


# ---- random, compared with the pool's map --------------------------------------------------------------


class HidingReader:
    """A reader like Dynamo's indexer: it hides blocks after a removed block until they are stored again."""

    def __init__(self):
        self.parents = {}
        self.is_reachable = {}

    def read(self, events):
        for event in events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                for block_hash in event.block_hashes:
                    self.parents[block_hash] = parent
                    self.is_reachable[block_hash] = parent is None or self.is_reachable.get(parent, False)
                    parent = block_hash
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.hide(block_hash)
                    self.is_reachable.pop(block_hash, None)
            else:
                self.is_reachable.clear()

    def hide(self, block_hash):
        hidden = {block_hash}
        while hidden:
            hidden = {
                one for one in self.is_reachable if self.parents[one] in hidden and self.is_reachable[one]
            }
            self.is_reachable.update(dict.fromkeys(hidden, False))

    def count(self, hashes):
        return next((n for n, one in enumerate(hashes) if not self.is_reachable.get(one)), len(hashes))


@pytest.mark.parametrize("seed", range(10))
def test_readers_find_whole_prefixes_after_inner_evictions(seed):
    rng = random.Random(seed)
    pool = BlockPool(60, True, BLOCK_SIZE, enable_kv_cache_events=True)
    manager = KVCacheManager(pool)
    hasher = BlockHasher("sha256_cbor", block_size=BLOCK_SIZE)
    state, hiding, mirror = StreamState(), HidingReader(), PrefixMirror(learns_tokens=True)
    roots = [[rng.randrange(1000) for _ in range(16)] for _ in range(3)]
    prompts = [root + [rng.randrange(1000) for _ in range(12)] for root in roots for _ in range(3)]
    num_evicted = 0
    for number in range(120):
        if rng.random() < 0.4:
            cached = [block.block_id for block in pool.blocks if block.block_hash is not None]
            num_evicted += len(chosen := set(rng.sample(cached, min(2, len(cached)))))
            pool.evict_blocks(chosen)
        request = Request(f"r{number}", [*rng.choice(prompts), rng.randrange(1000)], hasher)
        prefix = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None
        manager.free(request)
        sent = state.apply(manager.take_events())
        hiding.read(sent)
        mirror.apply("pool", sent)
        for prompt in prompts:
            hashes = Request("asks", prompt, hasher).block_hashes
            true = next(
                (n for n, one in enumerate(hashes) if not pool.get_cached_block(one, [0])), len(hashes)
            )
            assert hiding.count([int.from_bytes(one[-8:], "big") for one in hashes]) == true
            assert mirror.find_prefix_of_tokens(prompt).get("pool", 0) == true * BLOCK_SIZE
    assert num_evicted > 30
