"""Random requests, directives and sessions; a model ranks all blocks to predict which are evicted."""

import random

import pytest
from drawing import ids

from kv_pool import (
    BlockHasher,
    BlockLeases,
    BlockPool,
    BlockRetention,
    KVCacheManager,
    PinLimitError,
    Request,
    RetentionDirective,
)
from kv_pool.core import invariants
from kv_pool.core.policy_names import list_policies
from kv_pool.manager.invariants import check_leases
from kv_pool.manager.retention.invariants import check_retention

HASHER = BlockHasher("sha256", "s", 4)
NUM_BLOCKS = 12
MAX_PINNED = 4
MAX_SESSIONS = 2
NUM_STEPS = 120
SEEDS = range(250)
PIN = 101
NEVER = float("inf")


EMPTY, EXPIRED, DEFAULT, HELD = -200, -100, 35, 200


class SlowRetention:
    """The order of eviction by definition: a list of block ids for each band, and lists of claims."""

    def __init__(self):
        self.now = 0
        self.bands = {EMPTY: list(range(1, NUM_BLOCKS + 1))}
        self.references = dict.fromkeys(range(1, NUM_BLOCKS + 1), 0)
        self.contents = dict.fromkeys(self.references)
        self.claims = {block_id: [] for block_id in self.references}  # (strength, duration, until, session)
        self.placed = {}  # block id -> (band, freed at, number), if it has claims and is free or held
        self.number = 0
        self.sessions = {}  # name -> (until, unique claim, block ids)
        self.directives = {}  # request id -> directives
        self.promised = {}  # request id -> places of blocks to be pinned

    @property
    def queue(self):
        """Return the free blocks, next to be reused first."""
        return [block_id for band in sorted(self.bands) if band != HELD for block_id in self.bands[band]]

    @property
    def held(self):
        return self.bands.get(HELD, [])

    def put(self, block_id, band):
        self.remove(block_id)
        self.bands.setdefault(band, []).append(block_id)

    def remove(self, block_id):
        for blocks in self.bands.values():
            if block_id in blocks:
                blocks.remove(block_id)

    # ---- claims

    def find_end(self, block_id, claim):
        _, duration, until, session = claim
        return until if session else self.placed[block_id][1] + duration

    def is_pinned(self, block_id):
        return any(claim[0] == PIN for claim in self.claims[block_id])

    def count_pins(self):
        pinned = sum(self.is_pinned(block_id) for block_id in self.contents)
        return pinned + sum(len(places) for places in self.promised.values())

    def forget(self, block_id):
        self.contents[block_id] = None
        self.claims[block_id] = []
        self.placed.pop(block_id, None)

    def settle(self, block_id, claims, freed_at):
        """Set the claims in force on a free or held block, and its place."""
        self.claims[block_id] = claims
        band = self.placed.pop(block_id, (None, 0, 0))[0]
        if claims:
            strength = max(claim[0] for claim in claims)
            new = HELD if strength == PIN else strength + (strength >= 35)
            self.number += 1
            self.placed[block_id] = (new, freed_at, self.number)
            if new != band:
                self.put(block_id, new)

    def expire(self):
        """End claims in the order of their ends."""
        while True:
            ends = {
                block_id: min(self.find_end(block_id, claim) for claim in self.claims[block_id])
                for block_id in self.placed
            }
            due = min((end for end in ends.values() if end <= self.now), default=None)
            if due is None:
                break
            block_ids = [block_id for block_id, end in ends.items() if end == due]
            for block_id in sorted(block_ids, key=lambda block_id: self.placed[block_id][2]):
                if self.references[block_id]:  # leased: the pin is renewed when the lease ends
                    self.remove(block_id)
                    del self.placed[block_id]
                    continue
                left = [claim for claim in self.claims[block_id] if self.find_end(block_id, claim) > due]
                self.settle(block_id, left, self.placed[block_id][1])
                if not left:
                    self.put(block_id, EXPIRED)
        for name, (until, _, _) in list(self.sessions.items()):
            if until <= self.now:
                del self.sessions[name]

    # ---- use

    def find_band(self, block_id):
        return next(band for band, blocks in self.bands.items() if block_id in blocks)

    def take(self, taken):
        for block_id in taken:
            self.forget(block_id)
            self.remove(block_id)
            self.references[block_id] = 1

    def touch(self, block_ids, is_hit=True):
        for block_id in block_ids:
            if self.references[block_id] == 0 and block_id not in self.held:
                self.remove(block_id)
                self.placed.pop(block_id, None)
            elif is_hit and block_id in self.held:
                self.remove(block_id)
                del self.placed[block_id]
            self.references[block_id] += 1

    def release(self, block_ids):
        empty = []
        for block_id in block_ids:
            self.references[block_id] -= 1
            if self.references[block_id] or block_id in self.held:
                continue
            if self.contents[block_id] is None:
                self.claims[block_id] = []
                empty.append(block_id)
                continue
            live = [claim for claim in self.claims[block_id] if not claim[3] or claim[2] > self.now]
            self.put(block_id, DEFAULT)
            self.settle(block_id, live, self.now)
        self.bands[EMPTY] = empty + self.bands[EMPTY]

    def free_request(self, request_id, block_ids):
        for directive in self.directives.pop(request_id, []):
            for place in places_of(directive, len(block_ids)):
                if self.contents[block_ids[place]] is not None:
                    self.claims[block_ids[place]] = add(self.claims[block_ids[place]], claim_of(directive))
        self.promised.pop(request_id, None)
        self.release(block_ids[::-1])

    def set_claims(self, changes, restarts):
        for block_id, claims in reversed(changes):
            if self.references[block_id]:
                self.claims[block_id] = claims
                if block_id in self.held:
                    self.remove(block_id)
                    del self.placed[block_id]
                continue
            had_claims = block_id in self.placed
            freed_at = self.placed[block_id][1] if had_claims and not restarts else self.now
            self.settle(block_id, claims, freed_at)
            if had_claims and not claims:
                self.put(block_id, DEFAULT)

    def end_session(self, name):
        _, claim, block_ids = self.sessions.pop(name)
        changes = []
        for block_id in block_ids:
            claims = self.claims[block_id]
            if claim in claims:
                changes.append((block_id, [other for other in claims if other != claim]))
        self.set_claims(changes, False)

    def advance(self, seconds):
        self.now += seconds
        self.expire()


def add(claims, claim):
    """Remove directives' claims that another claim outlives and outranks."""
    both = [*claims, claim]
    return [
        one
        for place, one in enumerate(both)
        if one[3]
        or not any(
            other[0] >= one[0] and other[1] >= one[1] and (other[:2] != one[:2] or at < place)
            for at, other in enumerate(both)
            if at != place and not other[3]
        )
    ]


def claim_of(directive):
    strength = PIN if directive.pin else directive.priority
    return (strength, NEVER if directive.duration_s is None else directive.duration_s, NEVER, None)


def places_of(directive, num_blocks):
    """Return the places of all blocks that the directive covers in part."""
    return [
        place
        for place in range(num_blocks)
        if directive.start < 4 * place + 4 and (directive.end is None or 4 * place < directive.end)
    ]


class Run:
    """One random history of a manager, compared with the model."""

    def __init__(self, seed, policy=None):
        self.random = random.Random(seed)
        self.policy = policy
        self.model = SlowRetention()
        self.pool = BlockPool(NUM_BLOCKS + 1, True, 4, policy=policy)
        clock = lambda: self.model.now  # noqa: E731
        self.retention = BlockRetention(self.pool, clock, MAX_PINNED, MAX_SESSIONS)
        self.manager = KVCacheManager(self.pool, retention=self.retention)
        self.leases = BlockLeases(self.pool, clock)
        self.running = {}
        self.seen = []
        self.leased = []
        self.num_started = self.num_victims = self.num_hits = 0

    def make_directives(self):
        directives = []
        for _ in range(self.random.choice([0, 1, 1, 2])):
            start = self.random.choice([0, 0, 3, 4, 8])
            pin = self.random.random() < 0.2
            end = start + self.random.randint(1, 9) if pin or self.random.random() < 0.5 else None
            priority = self.random.choice([0, 20, 35, 50, 50, 90])
            duration = self.random.choice([None, None, 1, 3, 6])
            directives.append(RetentionDirective(start, end, priority, duration, pin))
        return directives

    def blocks_of(self, request):
        return self.manager.get_block_ids(request.request_id)

    def note_cached(self, request):
        for place, block_id in enumerate(self.blocks_of(request)):
            table = self.manager.get_table(request.request_id)
            if place < table.num_cached_blocks and self.pool.blocks[block_id].block_hash is not None:
                self.model.contents[block_id] = tuple(request.all_token_ids[: 4 * place + 4])

    def found(self, request, places):
        """Return the cached blocks of a prefix; the pool decides between copies."""
        for place in places:
            blocks = self.pool.get_cached_block(request.block_hashes[place], [0])
            if blocks is not None:
                content = tuple(request.all_token_ids[: 4 * place + 4])
                assert self.model.contents[blocks[0].block_id] == content
                yield blocks[0].block_id

    # ---- steps

    def start(self):
        tokens = [self.random.randint(0, 1) // 1 for _ in range(self.random.randint(1, 5))]
        prompt = [token for token in tokens for _ in range(4)] + [9] * self.random.randint(0, 3)
        self.num_started += 1
        session_id = self.random.choice([None, "s0", "s1", "s2"])
        request = Request(f"r{self.num_started}", prompt, HASHER, session_id=session_id)
        if self.random.random() < 0.7:
            self.set_directives(request)
        model = self.model
        prefix = self.manager.get_computed_blocks(request)
        hits = ids(prefix.blocks[0])
        for place, block_id in enumerate(hits):
            assert model.contents[block_id] == tuple(prompt[: 4 * place + 4])
        num_new = -(-len(prompt) // 4) - len(hits)
        num_free_hits = sum(block_id in model.queue for block_id in hits)
        fits = num_new + num_free_hits <= len(model.queue)
        added = self.manager.allocate_slots(request, len(prompt) - prefix.num_tokens, prefix)
        assert (added is not None) == fits
        if not fits:
            self.retention.set_directives(request.request_id, [])
            model.directives.pop(request.request_id, None)
            model.promised.pop(request.request_id, None)
            return
        self.num_hits += len(hits)
        model.touch(hits)
        if session_id in model.sessions:
            model.end_session(session_id)
        self.expect_taken(added)
        request.num_computed_tokens = len(prompt)
        self.running[request.request_id] = request
        self.note_cached(request)

    def expect_taken(self, added):
        """Check that the next blocks were taken, of the default band those that a policy chooses."""
        model, taken = self.model, ids(added[0])
        expected = model.queue[: len(taken)]
        bands = list(map(model.find_band, taken))
        assert bands == list(map(model.find_band, expected))
        for block_id, band, next_id in zip(taken, bands, expected, strict=True):
            assert block_id == next_id or (self.policy is not None and band == DEFAULT)
        self.num_victims += len(model.placed.keys() & set(taken))
        model.take(taken)

    def grow(self):
        if not self.running:
            return
        request = self.random.choice(list(self.running.values()))
        tokens = [self.random.randint(0, 1)] * self.random.randint(1, 5)
        num_new = -(-(request.num_tokens + len(tokens)) // 4) - len(self.blocks_of(request))
        if num_new > len(self.model.queue):
            return
        request.append_output_token_ids(tokens)
        self.expect_taken(self.manager.allocate_slots(request, len(tokens)))
        request.num_computed_tokens = request.num_tokens
        self.note_cached(request)

    def finish(self):
        if not self.running:
            return
        request = self.running.pop(self.random.choice(list(self.running)))
        keeps = self.random.random() < 0.4
        if keeps and self.random.random() < 0.5:
            self.keep_session(request)
            keeps = False
        block_ids = self.blocks_of(request)
        self.manager.free(request)
        self.model.free_request(request.request_id, block_ids)
        if keeps:
            self.keep_session(request)
        self.seen = [*self.seen[-5:], request]

    def keep_session(self, request):
        model = self.model
        name = request.session_id or "s0"
        until = model.now + self.random.randint(1, 8)
        priority = self.random.choice([20, 50, 100])
        block_ids = list(dict.fromkeys(self.found(request, range(len(request.block_hashes)))))
        assert self.retention.keep_session(name, request, until, priority) == len(block_ids)
        claim = (priority, NEVER, until, object())
        model.set_claims([(block_id, [*model.claims[block_id], claim]) for block_id in block_ids], False)
        if name in model.sessions:
            model.end_session(name)
        elif block_ids and len(model.sessions) >= MAX_SESSIONS:
            model.end_session(min(model.sessions, key=lambda name: model.sessions[name][0]))
        if block_ids:
            model.sessions[name] = (until, claim, block_ids)

    def end_session(self):
        name = self.random.choice(["s0", "s1", "s2"])
        assert self.retention.end_session(name) == (name in self.model.sessions)
        if name in self.model.sessions:
            self.model.end_session(name)

    def set_directives(self, request):
        model = self.model
        directives = self.make_directives()
        pins = {place for one in directives if one.pin for place in places_of(one, 100)}
        others = model.count_pins() - len(model.promised.get(request.request_id, ()))
        if pins and others + len(pins) > MAX_PINNED:
            with pytest.raises(PinLimitError, match=rf"\d blocks would be pinned, and {others} others"):
                self.retention.set_directives(request.request_id, directives)
            return
        self.retention.set_directives(request.request_id, directives)
        model.directives[request.request_id] = [one for one in directives if not one.is_none]
        model.promised[request.request_id] = pins

    def redirect(self):
        if self.running and self.random.random() < 0.5:
            self.set_directives(self.random.choice(list(self.running.values())))
            return
        known = [*self.running.values(), *self.seen]
        if not known:
            return
        model = self.model
        request = self.random.choice(known)
        directives = self.make_directives()
        changes = {}
        for directive in directives:
            for block_id in self.found(request, places_of(directive, len(request.block_hashes))):
                claims = changes.get(block_id)
                if claims is None:
                    claims = [claim for claim in model.claims[block_id] if claim[3]]
                changes[block_id] = claims if directive.is_none else add(claims, claim_of(directive))
        in_order = dict.fromkeys(self.found(request, range(len(request.block_hashes))))
        changes = {block_id: changes[block_id] for block_id in in_order if block_id in changes}
        num_new = sum(any(claim[0] == PIN for claim in claims) for claims in changes.values())
        others = model.count_pins() - sum(model.is_pinned(block_id) for block_id in changes)
        if num_new and others + num_new > MAX_PINNED:
            with pytest.raises(PinLimitError):
                self.retention.change_directives(request, directives)
            return
        assert self.retention.change_directives(request, directives) == len(changes)
        model.set_claims(list(changes.items()), True)

    def wait(self):
        self.model.advance(self.random.choice([1, 1, 2, 5]))

    def evict(self):
        block_id = self.random.randint(1, NUM_BLOCKS)
        self.retention.expire()
        # One block alone; `KVCacheManager.evict_blocks` evicts what was computed from it, too.
        self.pool.evict_blocks([block_id])
        self.retention.forget_blocks([self.pool.blocks[block_id]])
        model = self.model
        if model.claims[block_id] and model.references[block_id] == 0:
            model.put(block_id, EMPTY)
        elif block_id in model.held:
            model.remove(block_id)
        model.forget(block_id)

    def lease_blocks(self):
        model = self.model
        readable = [
            block_id for block_id in model.contents if model.contents[block_id] or model.references[block_id]
        ]
        if readable and len(self.leased) < 2:
            block_ids = self.random.sample(readable, min(len(readable), 2))
            blocks = [self.pool.blocks[block_id] for block_id in block_ids]
            self.retention.expire()
            self.leased.append(self.leases.acquire(blocks, model.now + self.random.randint(1, 4), "reader"))
            model.touch(block_ids, is_hit=False)

    def take_back(self):
        self.retention.expire()  # leases do not end claims
        for lease in self.leases.expire():
            self.model.release(ids(lease.blocks)[::-1])
            self.leased.remove(lease)
        if self.leased and self.random.random() < 0.5:
            lease = self.leased.pop(self.random.randrange(len(self.leased)))
            lease.release()
            self.model.release(ids(lease.blocks)[::-1])

    def reset(self):
        model = self.model
        is_idle = not any(model.references.values())
        assert self.manager.reset_prefix_cache() == is_idle
        if not is_idle:
            return
        model.sessions.clear()
        low = [block_id for band in sorted(model.bands) if band <= DEFAULT for block_id in model.bands[band]]
        high = [block_id for block_id in model.queue if block_id not in low]
        model.bands = {EMPTY: low + model.held[::-1] + high}
        for block_id in model.contents:
            model.forget(block_id)

    def step(self):
        steps = [self.start, self.grow, self.finish, self.wait, self.redirect, self.end_session]
        steps += [self.evict, self.lease_blocks, self.take_back, self.reset]
        self.random.choices(steps, [9, 5, 7, 4, 4, 1, 1, 1, 2, 0.3])[0]()

    def check(self):
        model, retention = self.model, self.retention
        invariants.check(self.pool)
        check_retention(retention)
        check_leases(self.leases)
        assert ids(self.pool.free_block_queue.get_all_free_blocks()) == model.queue
        for block_id, count in model.references.items():
            assert self.pool.blocks[block_id].ref_cnt == count + (block_id in model.held)
            assert (self.pool.blocks[block_id].block_hash is not None) == bool(model.contents[block_id])
        assert retention.num_retained == len(model.placed) - len(model.held)
        assert retention.num_pinned == sum(model.references[block_id] == 0 for block_id in model.held)
        assert retention.num_pins == model.count_pins()
        assert dict(retention.list_sessions()) == {name: kept[0] for name, kept in model.sessions.items()}
        assert self.manager.get_num_free_blocks() == len(model.queue)


@pytest.mark.parametrize("policy", ["lru", *list_policies()])
@pytest.mark.parametrize("first_seed", range(0, 40, 8))
def test_bands_come_first_with_any_policy(first_seed, policy):
    for seed in range(first_seed, first_seed + 8):
        live(seed, policy)


@pytest.mark.parametrize("seed", SEEDS)
def test_evicted_blocks_follow_the_definition(seed):
    live(seed)


def live(seed, policy=None):
    run = Run(seed, policy)
    for number in range(NUM_STEPS):
        run.step()
        if seed % 2 or number % 7 == 0:  # a check reads the clock, which alone may repair the state
            run.check()
    for request in list(run.running.values()):
        run.manager.free(request)
    for lease in run.leases.list_leases():
        lease.release()
    run.retention.release_all()
    assert run.pool.get_num_free_blocks() == NUM_BLOCKS
    assert not run.retention.is_active
