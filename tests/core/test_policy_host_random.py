"""Random requests on pools with cache policies: LRU as before, closure, and a slow model of flat LFU."""

import random
from contextlib import suppress

import pytest
from core.policy_pool import BLOCK_SIZE, HASHER, look_up_alone, make_manager, start
from drawing import ids

from kv_pool import BlockPool, BlockRetention, OutOfBlocksError, PinLimitError, RetentionDirective
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.cache_policy import STAY, CachePolicy
from kv_pool.core.policy_names import list_policies
from kv_pool.core.pool_state import ReuseWatcher
from kv_pool.manager.retention.invariants import check_retention

NUM_STEPS = 300
SALT = 0


class AtRandom(CachePolicy):
    """Chooses at random, moves runs between its queues at random, and keeps no promise but those it must."""

    num_queues = 3

    def start(self):
        self.rng = random.Random(self.capacity + 1000 * SALT)

    def cached(self, run):
        if self.rng.random() < 0.2:
            self.queues[self.rng.randrange(3)].append(run)

    def hit(self, run):
        if self.rng.random() < 0.2:
            self.queues[self.rng.randrange(3)].prepend(run)

    def freed(self, run):
        return STAY if run.queue is not None and self.rng.random() < 0.5 else self.rng.randrange(3)

    def choose(self):
        filled = [queue for queue in self.queues if queue.first is not None]
        queue = self.rng.choice(filled)
        if self.rng.random() < 0.3:
            self.rng.choice(self.queues).append(queue.first)
            filled = [queue for queue in self.queues if queue.first is not None]
        return self.rng.choice(filled).index


class Life:
    """A manager, and the requests that hold blocks of it."""

    def __init__(self, seed, policy, pool_type=BlockPool, num_blocks=None):
        self.steps = STEPS
        self.rng = random.Random(seed)
        num_blocks = num_blocks or self.rng.randrange(6, 40)
        options = {"early_share": 0.0} if pool_type is RunBlockPool else {}
        options["clock"] = lambda: float(self.num_requests)
        self.manager = make_manager(num_blocks, policy, pool_type, **options)
        self.pool = self.manager.block_pool
        self.prompts = [[self.rng.randrange(3) for _ in range(60)] for _ in range(6)]
        self.running = []
        self.holds = []
        self.num_requests = 0
        self.parents = {}  # hash -> the hash of the block before it, None for the first

    def step(self):
        name = self.rng.choices(list(self.steps), list(self.steps.values()))[0]
        result = getattr(self, name)()
        self.manager.take_block_copies()  # of forks; their blocks are held until then
        return name, result

    def start(self):
        self.num_requests += 1
        tokens = self.rng.choice(self.prompts)
        length = self.rng.randrange(2, len(tokens) + 1)
        tokens = tokens[:length]
        if self.rng.random() < 0.3:  # full blocks, of which the last is computed again
            tokens = tokens[: max(BLOCK_SIZE, length // BLOCK_SIZE * BLOCK_SIZE)]
        else:
            tokens += [self.rng.randrange(3) for _ in range(self.rng.randrange(9))]
        started = start(self.manager, f"request {self.num_requests}", tokens)
        if started is None:
            return None
        request, num_hits, added = started
        self.note_hashes(request)
        self.running.append(request)
        return num_hits, added

    def note_hashes(self, request):
        for before, after in zip([None, *request.block_hashes], request.block_hashes, strict=False):
            self.parents[after] = before

    def grow(self):
        if not self.running:
            return None
        request = self.rng.choice(self.running)
        count = self.rng.randrange(1, 6)
        request.append_output_token_ids([self.rng.randrange(3) for _ in range(count)])
        added = self.manager.allocate_slots(request, count)
        if added is None:
            return self.end(request)
        request.num_computed_tokens = request.num_tokens
        self.note_hashes(request)
        if self.rng.random() < 0.3:  # others continue from what was generated
            self.prompts[self.rng.randrange(6)] = list(request.all_token_ids)
        return ids(added[0])

    def end(self, request=None):
        if self.running:
            request = request or self.rng.choice(self.running)
            self.running.remove(request)
            self.manager.free(request)

    def fork(self):
        if self.running:
            parent = self.rng.choice(self.running)
            self.num_requests += 1
            child = type(parent)(f"fork {self.num_requests}", parent.all_token_ids, HASHER)
            child.num_computed_tokens = parent.num_computed_tokens
            self.manager.fork(parent, child)
            self.running.append(child)

    def hold(self):
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if cached and len(self.holds) < 2:
            self.holds.append(self.pool.hold([self.rng.choice(cached)], "held by a test"))

    def release(self):
        if self.holds:
            self.holds.pop().release()

    def take(self):
        """Take free blocks by id, as compaction and migrations do."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        some = self.rng.sample(free, min(len(free), self.rng.randrange(3)))
        self.pool.take_blocks(some)
        self.pool.free_blocks(some)

    def evict(self):
        self.pool.evict_blocks([self.rng.randrange(self.pool.num_gpu_blocks) for _ in range(2)])

    def swap(self):
        first, second = self.rng.sample(range(1, self.pool.num_gpu_blocks), 2)
        if {first, second}.isdisjoint(self.pool.holds.list_immovable_ids()):
            self.pool.swap_block_ids([(first, second)])

    def watch(self):
        with suppress(OutOfBlocksError):
            taken = self.pool.get_new_blocks(1)
            self.pool.unpin_blocks(taken, lambda block: None)

    def resize(self):
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        if self.rng.random() < 0.5:
            self.pool.add_blocks(2)
        elif {self.pool.num_gpu_blocks - 1, self.pool.num_gpu_blocks - 2} <= free and len(free) > 8:
            self.pool.remove_last_blocks(2)

    def reset(self):
        while self.holds:
            self.release()
        while self.running:
            self.end()
        assert self.manager.reset_prefix_cache()

    def check(self):
        (run_invariants if isinstance(self.pool, RunBlockPool) else invariants).check(self.pool)

    def list_cached(self):
        return {key[:-4] for key in self.pool.cached_block_hash_to_block.entries}


class ClaimedLife(Life):
    """A life whose pool has claims as well: directives, sessions, bands that are set by hand."""

    def __init__(self, seed, policy, pool_type):
        super().__init__(seed, policy, pool_type)
        self.steps = STEPS | CLAIMS
        self.retention = BlockRetention(self.pool, lambda: float(self.num_requests), max_pinned_blocks=3)
        self.manager.attach_retention(self.retention)
        self.ended = None

    def start(self):
        if self.rng.random() < 0.5:
            pin = self.rng.random() < 0.2
            duration_s = self.rng.choice([None, 1, 5])
            first = self.rng.choice([0, 0, 3, 8])
            directive = RetentionDirective(
                first, first + 9 if pin else None, self.rng.choice([0, 20, 35, 50]), duration_s, pin
            )
            with suppress(PinLimitError):
                self.retention.set_directives(f"request {self.num_requests + 1}", [directive])
        if super().start() is None:
            self.retention.set_directives(f"request {self.num_requests}", [])

    def end(self, request=None):
        if self.running:
            self.ended = request or self.rng.choice(self.running)
            super().end(self.ended)

    def keep(self):
        if self.ended is not None:
            until = self.num_requests + self.rng.randrange(1, 9)
            self.retention.keep_session(self.rng.choice("abc"), self.ended, until, self.rng.choice([20, 50]))

    def expire(self):
        self.retention.expire()

    def release_all(self):
        self.retention.release_all()

    def find_invalid(self):
        self.manager.evict_blocks([self.rng.randrange(1, self.pool.num_gpu_blocks)])

    def move(self):
        free = [
            block for block in self.pool.free_block_queue.get_all_free_blocks() if block.retention_id == 0
        ]
        some = [block for block in free if block.block_hash is not None][: self.rng.randrange(3)]
        self.pool.move_to_band([*some, *some], self.rng.choice([0, 5, -5]))

    def reuse_watched(self):
        """A watcher of a block that is taken takes others, or fails."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        if len(free) > 1:
            watched = self.rng.choice(free)
            self.pool.reuse_watchers[watched.block_id] = ReuseWatcher(self.rng.choice([self.use, fail]), 0.0)
            with suppress(WatcherError):
                self.pool.take_blocks([watched])
                self.pool.free_blocks([watched])

    def use(self, block):
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks() // 2))

    def check(self):
        super().check()
        check_retention(self.retention)


class WatcherError(Exception):
    """The exception of a watcher that fails."""


def fail(block):
    raise WatcherError


CLAIMS = {"keep": 2, "expire": 1, "release_all": 0.2, "find_invalid": 0.7, "move": 0.5, "reuse_watched": 0.3}
REQUESTS = {"start": 8, "grow": 4, "end": 6}
STEPS = {
    **REQUESTS,
    "fork": 1,
    "hold": 1,
    "release": 1,
    "take": 0.5,
    "evict": 0.5,
    "swap": 1,
    "watch": 0.5,
    "resize": 0.5,
    "reset": 0.2,
}


@pytest.mark.parametrize("pool_type", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("seed", range(20))
def test_lru_as_a_policy_takes_the_blocks_of_the_free_queue(seed, pool_type, monkeypatch):
    for name in set(STEPS) - set(REQUESTS) - {"fork", "reset"}:
        monkeypatch.delitem(STEPS, name)
    plain, policed = Life(seed, None, pool_type), Life(seed, "lru", pool_type)
    for _ in range(NUM_STEPS):
        assert policed.step() == plain.step()
        policed.check()


@pytest.mark.parametrize("pool_type", [BlockPool, RunBlockPool])
@pytest.mark.parametrize("policy", [AtRandom, "lru", *list_policies()], ids=str)
@pytest.mark.parametrize("first_seed", [0, 2, 4])
def test_any_policy_keeps_the_invariants_in_any_schedule(first_seed, policy, pool_type):
    for life in (Life(first_seed, policy, pool_type), ClaimedLife(first_seed + 1, policy, pool_type)):
        for _ in range(NUM_STEPS):
            life.step()
            life.check()
        assert life.pool.policy_host.failure is None


@pytest.mark.parametrize("policy", [AtRandom, *list_policies()], ids=str)
def test_no_policy_evicts_a_parent_before_its_children(policy, monkeypatch):
    for name in set(STEPS) - set(REQUESTS):
        monkeypatch.delitem(STEPS, name)
    num_evicted = 0
    for seed in range(8):
        life = Life(seed, policy, num_blocks=24)
        for _ in range(NUM_STEPS):
            life.step()
            cached = life.list_cached()
            assert all(life.parents[known] is None or life.parents[known] in cached for known in cached)
        num_evicted += life.pool.num_evictions
    assert num_evicted > 100


@pytest.mark.parametrize("policy", list_policies())
def test_a_policy_evicts_the_same_blocks_again(policy, monkeypatch):
    lives = [Life(3, policy), Life(3, policy)]
    for _ in range(NUM_STEPS):
        assert lives[0].step() == lives[1].step()


# ---- a slow model of a flat policy ------------------------------------------------------------------


def model_lfu(keys, capacity):
    """Return hits of LFU with dynamic ageing; ties go to the older use."""
    cached, age = {}, 0  # key -> value, time of the last use, uses
    for now, key in enumerate(keys):
        yield key in cached
        if key not in cached and len(cached) == capacity:
            victim = min(cached, key=lambda other: cached[other][:2])
            age = cached.pop(victim)[0]
        uses = cached[key][2] + 1 if key in cached else 1
        cached[key] = (age + uses, now, uses)


@pytest.mark.parametrize("seed", range(6))
def test_flat_lfu_agrees_with_a_slow_model(seed):
    """The other flat policies have the hits of libCacheSim: see tests/policies/."""
    rng = random.Random(seed)
    capacity = rng.randrange(4, 40)
    keys = [b"%08d" % min(int(rng.expovariate(0.04)), 200) for _ in range(1500)]
    pool = BlockPool(capacity + 1, True, BLOCK_SIZE, policy="flat:lfu")
    hits = [look_up_alone(pool, key) for key in keys]
    assert hits == list(model_lfu(keys, capacity))
    assert 100 < sum(hits) < 1400
    invariants.check(pool)
