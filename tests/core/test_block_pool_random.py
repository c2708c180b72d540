"""Random calls on the pool and on a slow model of lists and dicts, with all invariants checked every step."""

import pytest
from drawing import GROUP, hash_of, ids, make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_pool import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    InvalidBlockError,
    InvalidTypeError,
    OutOfBlocksError,
)
from kv_pool.core import invariants

NUM_HASHES = 6
STEPS_PER_RUN = 50
NUM_RUNS = 200
MIN_STEPS = 4_000

block_counts = st.integers(0, 5)
numbers = st.integers(0, NUM_HASHES - 1)


class SlowPool:
    """The simplest model of a pool: a list, a dict of counts, and a list of (hash, id)."""

    def __init__(self, num_blocks, caching):
        self.caching = caching
        self.free = list(range(1, num_blocks))
        self.references = dict.fromkeys(range(1, num_blocks), 0)
        self.hashes = []  # (number, block id), oldest first
        self.events = []

    def hash_of(self, block_id):
        return next((number for number, held in self.hashes if held == block_id), None)

    def evict(self, block_id):
        number = self.hash_of(block_id)
        if number is not None:
            self.hashes.remove((number, block_id))
            self.events.append(("removed", number))

    def take(self, count):
        taken = self.free[:count]
        del self.free[:count]
        for block_id in taken:
            if self.caching:
                self.evict(block_id)
            self.references[block_id] = 1
        return taken

    def touch(self, block_ids):
        for block_id in block_ids:
            if self.references[block_id] == 0:
                self.free.remove(block_id)
            self.references[block_id] += 1

    def release(self, block_ids):
        first, last = [], []
        for block_id in block_ids:
            self.references[block_id] -= 1
            if self.references[block_id] == 0:
                cached = self.caching and self.hash_of(block_id) is not None
                (last if cached else first).append(block_id)
        self.free = first + self.free + last

    def find(self, number):
        return next((held for found, held in self.hashes if found == number), None)


class PoolMachine(RuleBasedStateMachine):
    steps = 0

    @initialize(num_blocks=st.integers(1, 9), caching=st.booleans(), events=st.booleans())
    def make(self, num_blocks, caching, events):
        self.pool = BlockPool(num_blocks, caching, 4, enable_kv_cache_events=events)
        self.model = SlowPool(num_blocks, caching)

    def pick(self, data, block_ids, **limits):
        return data.draw(st.lists(st.sampled_from(sorted(block_ids)), **limits))

    def in_use(self):
        return [block_id for block_id, count in self.model.references.items() if count]

    def blocks(self, block_ids):
        return [self.pool.blocks[block_id] for block_id in block_ids]

    @rule(count=block_counts)
    def take(self, count):
        if count > len(self.model.free):
            with pytest.raises(OutOfBlocksError):
                self.pool.get_new_blocks(count)
        else:
            assert ids(self.pool.get_new_blocks(count)) == self.model.take(count)

    @precondition(lambda self: self.model.references)
    @rule(data=st.data(), null=st.booleans())
    def touch(self, data, null):
        chosen = self.pick(data, self.model.references, max_size=4)
        listed = self.blocks(chosen)
        self.pool.touch([self.pool.null_block, *listed] if null else listed)
        self.model.touch(chosen)

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), null=st.booleans())
    def free(self, data, null):
        chosen = self.pick(data, self.in_use(), max_size=5)
        listed = self.blocks(chosen)
        if null:
            listed.insert(len(listed) // 2, self.pool.null_block)
        too_often = any(chosen.count(b) > self.model.references[b] for b in chosen)
        if too_often:
            with pytest.raises(InvalidBlockError):
                self.pool.free_blocks(listed)
        else:
            self.pool.free_blocks(iter(listed))
            self.model.release(chosen)

    @precondition(lambda self: self.in_use() and self.model.free)
    @rule(data=st.data())
    def free_with_a_free_block_in_the_list(self, data):
        chosen = self.pick(data, self.in_use(), max_size=3, unique=True)
        chosen.insert(len(chosen) // 2, self.model.free[0])
        with pytest.raises(InvalidBlockError):
            self.pool.free_blocks(self.blocks(chosen))

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), call=st.sampled_from(["touch", "free_blocks"]))
    def call_with_no_block_in_the_list(self, data, call):
        chosen = self.blocks(self.pick(data, self.in_use(), max_size=3, unique=True))
        with pytest.raises(InvalidTypeError):
            getattr(self.pool, call)([*chosen, "no block"])

    @precondition(lambda self: self.in_use())
    @rule(data=st.data(), hash_numbers=st.lists(numbers, min_size=1, max_size=4))
    def cache(self, data, hash_numbers):
        fresh = [b for b in self.in_use() if self.model.hash_of(b) is None]
        if not fresh:
            return
        chosen = self.pick(data, fresh, min_size=1, max_size=len(hash_numbers), unique=True)
        request = make_request([hash_of(number) for number in hash_numbers])
        first = data.draw(st.integers(0, len(chosen)))
        self.pool.cache_full_blocks(request, self.blocks(chosen), first, len(chosen), 4, 0)
        for position in range(first, len(chosen)):
            self.model.hashes.append((hash_numbers[position], chosen[position]))
        if first < len(chosen):
            self.model.events.append(("stored", tuple(hash_numbers[first : len(chosen)])))

    @precondition(lambda self: self.model.references)
    @rule(data=st.data())
    def evict(self, data):
        chosen = self.pick(data, self.model.references, max_size=3, unique=True)
        self.pool.evict_blocks(chosen)
        for block_id in chosen:
            self.model.evict(block_id)

    @rule(unknown=st.sampled_from([-1, 9, 100]))
    def evict_unknown(self, unknown):
        with pytest.raises(InvalidBlockError):
            self.pool.evict_blocks([*self.model.references, unknown])

    @rule()
    def reset(self):
        done = self.pool.reset_prefix_cache()
        assert done == (not self.in_use())
        if done:
            self.model.hashes.clear()
            self.model.events.append(("cleared",))

    @rule()
    def take_events(self):
        told = [tell(event) for event in self.pool.take_events()]
        assert told == (self.model.events if self.pool.enable_kv_cache_events else [])
        self.model.events = []

    @rule(wanted=st.lists(numbers, max_size=6), limit=st.integers(-1, 6))
    def look_up(self, wanted, limit):
        expected = []
        for number in wanted[: max(limit, 0)]:
            if self.model.find(number) is None:
                break
            expected.append(self.model.find(number))
        hashes = [hash_of(number) for number in wanted]
        assert ids(self.pool.find_cached_prefix(hashes, limit)) == expected
        for number in wanted:
            found = self.model.find(number)
            answer = self.pool.get_cached_block(hash_of(number), [0])
            assert ids(answer) == (None if found is None else [found])

    @invariant()
    def agrees_with_the_model(self):
        PoolMachine.steps += 1
        invariants.check(self.pool)
        assert ids(self.pool.free_block_queue.get_all_free_blocks()) == self.model.free
        assert self.pool.get_num_free_blocks() == len(self.model.free)
        for block_id, count in self.model.references.items():
            block = self.pool.blocks[block_id]
            number = self.model.hash_of(block_id)
            assert block.ref_cnt == count
            assert block.block_hash == (None if number is None else hash_of(number) + GROUP)
        total = len(self.model.references)
        assert self.pool.get_usage() == (1 - len(self.model.free) / total if total else 0)


def tell(event):
    """Return an event in the model's form."""
    if isinstance(event, AllBlocksCleared):
        return ("cleared",)
    told = tuple(int(h.to_bytes(8, "big")[-4:].decode()) for h in event.block_hashes)
    return ("removed", told[0]) if isinstance(event, BlockRemoved) else ("stored", told)


@pytest.mark.parametrize("seed", range(3))  # hypothesis draws other cases for each
def test_random_calls_agree_with_a_slow_model(seed):
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=NUM_RUNS,
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert PoolMachine.steps >= MIN_STEPS
