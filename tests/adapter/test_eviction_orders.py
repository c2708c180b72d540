"""The kept orders of evictions, compared with a ranking of all sequences; and their cost, in calls."""

import random

import pytest
from adapter.made_pool import CountingClock, check
from interrupting import interrupt_everywhere

from kv_pool import COMPILED, BlockAllocationRequest, GPUKVPool, KVPoolError, LRUEviction, PoolExhaustedError
from kv_pool.manager.sequences.ranked_order import SequenceInfo


class Largest:
    """Most blocks first, then least recently accessed."""

    def rank(self, sequences):
        return [one.sequence_id for one in sorted(sequences, key=lambda one: -one.num_blocks)]


class OnlyOdd:
    """In the order of access, without every second sequence."""

    def rank(self, sequences):
        return [one.sequence_id for one in sequences if one.sequence_id % 2]


class HighFirst:
    def rank(self, sequences):
        ranked = sorted(sequences, key=lambda one: (-one.priority, -one.last_access_time))
        return (one.sequence_id for one in ranked)


class ByMood:
    """An order that changes without a change of any sequence."""

    ranks_each_time = True
    mood = 1

    def rank(self, sequences):
        return [one.sequence_id for one in sorted(sequences, key=lambda one: self.mood * one.sequence_id)]


POLICIES = {"lru": LRUEviction(), "largest": Largest(), "odd": OnlyOdd(), "mood": ByMood()}


def list_expected(pool, policy, priority, own):
    """Rank all sequences that may be evicted, by a full scan."""
    candidates = []
    for sequence_id in pool.list_sequences():
        infos = [pool.get_block_info(block_id) for block_id in pool.blocks_of(sequence_id)]
        holder = pool.holdings.holders[sequence_id]
        if holder.priority <= priority and sequence_id != own and not any(one.is_pinned for one in infos):
            candidates.append(SequenceInfo(sequence_id, len(infos), holder.priority, holder.last_access_time))
    return [one for one in policy.rank(candidates) if one in {info.sequence_id for info in candidates}]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", POLICIES)
def test_a_kept_order_is_that_of_a_full_ranking(name, seed):
    rng = random.Random(f"{name} {seed}")
    policy = POLICIES[name]
    pool = GPUKVPool(60, 4, eviction_policy=policy, clock=CountingClock(), on_evicted=lambda *evicted: None)
    for _ in range(120):
        sequence_id = rng.randrange(24)
        held = pool.holdings.holders.get(sequence_id)
        ids = [] if held is None else [block.block_id for block in held.blocks]
        some = rng.sample(ids, rng.randint(0, len(ids)))
        try:
            match rng.randrange(9):
                case 0 | 1 | 2:
                    num_blocks, priority = rng.randint(1, 5), rng.choice([0, 0, 0, 1, 2])
                    pool.allocate(BlockAllocationRequest(num_blocks, sequence_id, priority=priority))
                case 3:
                    pool.free(some, sequence_id if ids else None)
                case 4:
                    pool.note_access(sequence_id)
                case 5:
                    pool.fork(sequence_id, rng.randrange(24, 48))
                case 6:
                    pool.pin(some[:2], sequence_id if ids and rng.random() < 0.5 else None)
                case 7:
                    pool.unpin([one for one in ids if pool.get_block_info(one).is_pinned])
                case 8:
                    pool.evict(rng.randint(1, 4))
        except KVPoolError:
            pass
        if name == "mood":
            policy.mood = rng.choice([-1, 1])
        check(pool)
        for priority in (0, 2):
            own = rng.choice([None, sequence_id])
            assert pool.list_victims(1000, priority, own) == list_expected(pool, policy, priority, own)


def count_ranked(policy, num_sequences, num_evictions=50):
    """Fill a pool with sequences, evict some, and count the sequences that the policy was given meanwhile."""
    given = []

    class Counting:
        def rank(self, sequences):
            given.append(len(sequences))
            return policy.rank(sequences)

    pool = GPUKVPool(4 * num_sequences, 16, eviction_policy=Counting())
    for number in range(num_sequences + 1):
        pool.allocate(BlockAllocationRequest(4, number))
    given.clear()
    for number in range(num_evictions):
        pool.allocate(BlockAllocationRequest(4, 10**6 + number))
    return sum(given) / num_evictions


@pytest.mark.parametrize("policy", [Largest(), OnlyOdd(), HighFirst()])
def test_a_policy_ranks_few_sequences_for_each_eviction(policy):
    """It ranked all of them: an allocation that evicts one cost O(sequences)."""
    assert count_ranked(policy, 2000) < 2 * count_ranked(policy, 200) < 100


class CountedPins(dict):
    """Pins that count how often a sequence's blocks are looked up."""

    num_looked_up = 0

    def keys(self):
        self.num_looked_up += 1
        return super().keys()


def test_pinned_sequences_are_passed_once():
    """Each eviction passed all pinned sequences that were accessed before the next one to evict."""
    pool = GPUKVPool(2000, 16)
    for number in range(500):
        pool.allocate(BlockAllocationRequest(4, number))
    for number in range(400):
        pool.pin(pool.blocks_of(number)[:1])
    owners = pool.holdings.pins.owners = CountedPins(pool.holdings.pins.owners)
    pool.allocate(BlockAllocationRequest(4, 1000))
    assert owners.num_looked_up > 400
    owners.num_looked_up = 0
    for number in range(20):
        pool.allocate(BlockAllocationRequest(4, 2000 + number))
    assert owners.num_looked_up < 60
    pool.unpin(pool.blocks_of(7)[:1])  # the least recently accessed one that is not pinned now
    pool.unpin(pool.blocks_of(3)[:1])
    assert pool.list_victims(5) == [3, 7]
    pool.note_access(3)
    assert pool.list_victims(1) == [7]


def test_a_policy_may_change_its_mind_about_what_it_leaves_out():
    """A sequence that is left out is ranked again before a request is refused."""

    class Old:
        least = 0

        def rank(self, sequences):
            return [one.sequence_id for one in sequences if one.sequence_id >= self.least]

    policy = Old()
    policy.least = 5
    pool = GPUKVPool(8, 4, eviction_policy=policy)
    for number in range(2):
        pool.allocate(BlockAllocationRequest(4, number))
    with pytest.raises(PoolExhaustedError):
        pool.allocate(BlockAllocationRequest(1, 9))
    policy.least = 1
    pool.allocate(BlockAllocationRequest(1, 9))
    assert pool.list_sequences() == [0, 9]


def test_a_policy_that_raises_changes_nothing():
    class Broken(Largest):
        fails = True

        def rank(self, sequences):
            if self.fails:
                raise RuntimeError("no order")
            return super().rank(sequences)

    policy = Broken()
    pool = GPUKVPool(8, 4, eviction_policy=policy)
    for number in range(2):
        pool.allocate(BlockAllocationRequest(3 + number, number))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no order"):
            pool.allocate(BlockAllocationRequest(2, 9))
        check(pool)
    policy.fails = False
    pool.allocate(BlockAllocationRequest(2, 9))
    assert pool.list_sequences() == [0, 9]


def test_sequences_of_one_time_keep_their_order_after_an_unpin():
    now = 0.0
    pool = GPUKVPool(40, 4, eviction_policy=LRUEviction(), clock=lambda: now)
    for sequence_id, now in ((9, 0.0), (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)):  # noqa: B007 (read by the clock)
        pool.allocate(BlockAllocationRequest(1, sequence_id))
    pool.pin(pool.blocks_of(4))
    assert pool.list_victims(1000) == [9, 1, 2, 3]
    pool.unpin(pool.blocks_of(4))
    assert pool.list_victims(1000) == [9, 1, 2, 3, 4]


@pytest.mark.skipif(COMPILED, reason="compiled code has no points at which a signal handler runs")
@pytest.mark.parametrize("name", ["lru", "largest", "odd"])
def test_an_interrupt_loses_no_sequence_of_the_order(name):
    """A sequence between two queues was never evicted again, and its next access raised a KeyError."""

    def make():
        pool = GPUKVPool(40, 4, eviction_policy=POLICIES[name], clock=CountingClock())
        for number in range(5):
            pool.allocate(BlockAllocationRequest(1 + number % 2, number))
        for number in (1, 3):
            pool.pin(pool.blocks_of(number))
        pool.list_victims(1000)  # sets the pinned ones aside
        pool.note_access(2)
        pool.unpin(pool.blocks_of(1))
        return pool

    def use(pool):
        pool.list_victims(1000)
        pool.note_access(3)

    def check_order(pool):
        if pool.block_pool.is_changing:
            pool.repair()
        check(pool)
        found = pool.list_victims(1000)
        assert found == list_expected(pool, POLICIES[name], 2, None)
        assert not pool.holdings.pins.unpinned
        for number in range(5):
            pool.note_access(number)

    num_points, broken = interrupt_everywhere(make, use, check_order)
    assert num_points > 20
    assert not broken, broken[:3]
