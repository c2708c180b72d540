"""Random requests, directives and sessions through a manager; a model ranks all blocks to find victims."""

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


class SlowRetention:
    """Who is kept and who goes first, by definition: lists of claims, and a sort of all candidates."""

    def __init__(self):
        self.now = 0
        self.queue = list(range(1, NUM_BLOCKS + 1))
        self.references = dict.fromkeys(self.queue, 0)
        self.contents = dict.fromkeys(self.queue)
        self.claims = {block_id: [] for block_id in self.queue}  # (strength, duration, until, session)
        self.kept = {}  # block id -> [freed at, stamp]
        self.stamp = 0
        self.sessions = {}  # name -> (until, unique claim, block ids)
        self.directives = {}  # request id -> directives
        self.promised = {}  # request id -> places of blocks to be pinned

    # ---- claims

    def end_of(self, block_id, claim):
        _, duration, until, session = claim
        return until if session else self.kept[block_id][0] + duration

    def in_force(self, block_id):
        claims = self.claims[block_id]
        if block_id in self.kept:
            return [claim for claim in claims if self.end_of(block_id, claim) > self.now]
        return claims

    def is_pinned(self, block_id):
        return any(claim[0] == PIN for claim in self.in_force(block_id))

    def count_pins(self):
        pinned = sum(self.is_pinned(block_id) for block_id in self.contents)
        return pinned + sum(len(places) for places in self.promised.values())

    def list_available(self):
        return [block_id for block_id in self.kept if not self.is_pinned(block_id)]

    # ---- victims

    def rank(self, block_id, num_empty):
        if block_id in self.kept:
            _, stamp = self.kept[block_id]
            claims = self.in_force(block_id)
            if not claims:
                return (1, max(self.end_of(block_id, claim) for claim in self.claims[block_id]), stamp)
            strength = max(claim[0] for claim in claims)
            return (2 if strength < 35 else 4, strength, stamp)
        place = self.queue.index(block_id)
        return (0 if place < num_empty else 3, place, 0)

    def rank_all(self, block_ids):
        num_empty = 0
        while num_empty < len(self.queue) and self.contents[self.queue[num_empty]] is None:
            num_empty += 1
        return sorted(block_ids, key=lambda block_id: self.rank(block_id, num_empty))

    def forget(self, block_id):
        self.contents[block_id] = None
        self.claims[block_id] = []

    def take(self, count):
        taken = self.rank_all(self.queue + self.list_available())[:count]
        for block_id in taken:
            self.forget(block_id)
            if block_id in self.kept:
                del self.kept[block_id]
            else:
                self.queue.remove(block_id)
            self.references[block_id] = 1
        return taken

    # ---- use

    def touch(self, block_ids):
        for block_id in block_ids:
            if block_id in self.kept:
                self.claims[block_id] = self.in_force(block_id)
                del self.kept[block_id]
            elif self.references[block_id] == 0:
                self.queue.remove(block_id)
            self.references[block_id] += 1

    def enqueue(self, block_ids):
        empty = [block_id for block_id in block_ids if self.contents[block_id] is None]
        self.queue = empty + self.queue + [block_id for block_id in block_ids if block_id not in empty]

    def keep(self, block_id):
        self.stamp += 1
        self.kept[block_id] = [self.now, self.stamp]

    def release(self, block_ids):
        plain, over = [], []
        for block_id in block_ids:
            self.references[block_id] -= 1
            if self.references[block_id]:
                continue
            if self.contents[block_id] is None or not self.claims[block_id]:
                plain.append(block_id)
                self.claims[block_id] = []
                continue
            live = [claim for claim in self.claims[block_id] if not claim[3] or claim[2] > self.now]
            self.claims[block_id] = live
            if live:
                self.keep(block_id)
            else:
                over.append(block_id)
        self.enqueue(plain)
        self.enqueue(over)

    def free_request(self, request_id, block_ids):
        for directive in self.directives.pop(request_id, []):
            for place in places_of(directive, len(block_ids)):
                if self.contents[block_ids[place]] is not None:
                    self.claims[block_ids[place]] = [*self.claims[block_ids[place]], claim_of(directive)]
        self.promised.pop(request_id, None)
        self.release(block_ids[::-1])

    def set_claims(self, changes, counts_anew):
        plain, fresh = [], []
        for block_id, claims in reversed(changes):
            if block_id in self.kept:
                if counts_anew:
                    self.kept[block_id][0] = self.now
                if not claims:
                    del self.kept[block_id]
                    plain.append(block_id)
            elif self.references[block_id] == 0 and claims:
                self.queue.remove(block_id)
                fresh.append(block_id)
            self.claims[block_id] = claims
        for block_id in fresh:
            self.keep(block_id)
        self.enqueue(plain)

    def end_session(self, name):
        _, claim, block_ids = self.sessions.pop(name)
        changes = []
        for block_id in block_ids:
            claims = self.in_force(block_id)
            if claim in claims:
                changes.append((block_id, [other for other in claims if other != claim]))
        self.set_claims(changes, False)

    def advance(self, seconds):
        self.now += seconds
        for name, (until, _, _) in list(self.sessions.items()):
            if until <= self.now:
                del self.sessions[name]


def claim_of(directive):
    strength = PIN if directive.pin else directive.priority
    return (strength, NEVER if directive.duration_s is None else directive.duration_s, NEVER, None)


def places_of(directive, num_blocks):
    """Places of the blocks any of whose tokens the directive covers."""
    return [
        place
        for place in range(num_blocks)
        if directive.start < 4 * place + 4 and (directive.end is None or 4 * place < directive.end)
    ]


class Run:
    """One random history of a manager and of the model beside it."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.model = SlowRetention()
        self.pool = BlockPool(NUM_BLOCKS + 1, True, 4)
        clock = lambda: self.model.now  # noqa: E731
        self.retention = BlockRetention(self.pool, clock, MAX_PINNED, MAX_SESSIONS)
        self.manager = KVCacheManager(self.pool, retention=self.retention)
        self.leases = BlockLeases(self.pool, clock, self.retention)
        self.running = {}
        self.seen = []
        self.lent = []
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
        """The cached blocks of a prefix; which copy counts is the pool's business."""
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
        num_free_hits = sum(block_id in model.queue + model.list_available() for block_id in hits)
        fits = num_new + num_free_hits <= len(model.queue) + len(model.list_available())
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
        before = {block_id for block_id in self.model.kept if self.model.contents[block_id] is not None}
        taken = self.model.take(len(added[0]))
        self.num_victims += len(before & set(taken))
        assert sorted(ids(added[0])) == sorted(taken)

    def grow(self):
        if not self.running:
            return
        request = self.random.choice(list(self.running.values()))
        tokens = [self.random.randint(0, 1)] * self.random.randint(1, 5)
        num_new = -(-(request.num_tokens + len(tokens)) // 4) - len(self.blocks_of(request))
        if num_new > len(self.model.queue) + len(self.model.list_available()):
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
        model.set_claims([(block_id, [*model.in_force(block_id), claim]) for block_id in block_ids], False)
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
            with pytest.raises(
                PinLimitError, match=f"{len(pins)} blocks would be pinned, and {others} others"
            ):
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
                    claims = [claim for claim in model.in_force(block_id) if claim[3]]
                changes[block_id] = claims if directive.is_none else [*claims, claim_of(directive)]
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

    def reclaim(self):
        model = self.model
        count = self.random.randint(0, 3)
        victims = model.rank_all(model.list_available())[:count]
        assert self.retention.reclaim(count) == len(victims)
        for block_id in victims:
            model.forget(block_id)
            del model.kept[block_id]
        model.enqueue(victims)

    def evict(self):
        block_id = self.random.randint(1, NUM_BLOCKS)
        self.manager.evict_blocks([block_id])
        self.model.forget(block_id)
        if block_id in self.model.kept:
            del self.model.kept[block_id]
            self.model.enqueue([block_id])

    def lend(self):
        model = self.model
        readable = [
            block_id for block_id in model.contents if model.contents[block_id] or model.references[block_id]
        ]
        if readable and len(self.lent) < 2:
            block_ids = self.random.sample(readable, min(len(readable), 2))
            blocks = [self.pool.blocks[block_id] for block_id in block_ids]
            self.lent.append(self.leases.lend(blocks, model.now + self.random.randint(1, 4), "reader"))
            model.touch(block_ids)

    def take_back(self):
        for lease in self.leases.expire():
            self.model.release(ids(lease.blocks)[::-1])
            self.lent.remove(lease)
        if self.lent and self.random.random() < 0.5:
            lease = self.lent.pop(self.random.randrange(len(self.lent)))
            lease.give_back()
            self.model.release(ids(lease.blocks)[::-1])

    def reset(self):
        model = self.model
        is_idle = not any(model.references.values())
        assert self.manager.reset_prefix_cache() == is_idle
        if not is_idle:
            return
        kept = model.rank_all(list(model.kept))
        model.kept.clear()
        model.sessions.clear()
        model.queue += kept
        for block_id in model.contents:
            model.forget(block_id)

    def step(self):
        steps = [self.start, self.grow, self.finish, self.wait, self.redirect, self.end_session, self.reclaim]
        steps += [self.evict, self.lend, self.take_back, self.reset]
        self.random.choices(steps, [9, 5, 7, 4, 4, 1, 1, 1, 1, 2, 0.3])[0]()

    def check(self):
        model, retention = self.model, self.retention
        invariants.check(self.pool)
        check_retention(retention)
        check_leases(self.leases)
        assert ids(self.pool.free_block_queue.get_all_free_blocks()) == model.queue
        for block_id, count in model.references.items():
            assert self.pool.blocks[block_id].ref_cnt == count + (block_id in model.kept)
            assert (self.pool.blocks[block_id].block_hash is not None) == bool(model.contents[block_id])
        assert retention.num_kept == len(model.list_available())
        assert {
            block_id for block_id in model.contents if retention.holds(self.pool.blocks[block_id])
        } == set(model.list_available())
        assert retention.num_pinned == len(model.kept) - len(model.list_available())
        assert retention.num_pins == model.count_pins()
        assert dict(retention.list_sessions()) == {name: kept[0] for name, kept in model.sessions.items()}
        assert self.manager.get_num_free_blocks() == len(model.queue) + len(model.list_available())


@pytest.mark.parametrize("seed", SEEDS)
def test_the_victims_are_those_that_the_definition_picks(seed):
    run = Run(seed)
    for number in range(NUM_STEPS):
        run.step()
        if seed % 2 or number % 7 == 0:  # a check looks at the clock, which may be what makes things right
            run.check()
    for request in list(run.running.values()):
        run.manager.free(request)
    for lease in run.leases.list_leases():
        lease.give_back()
    run.retention.release_all()
    assert run.pool.get_num_free_blocks() == NUM_BLOCKS
    assert not run.retention.is_active


def test_the_histories_are_worth_something():
    runs = [Run(seed) for seed in range(20)]
    for run in runs:
        for _ in range(NUM_STEPS):
            run.step()
    assert sum(run.num_victims for run in runs) > 200
    assert sum(run.num_hits for run in runs) > 300
