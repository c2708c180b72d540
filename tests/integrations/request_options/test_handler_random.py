"""Random requests with options, against a second manager on which a model calls the retention by hand."""

import random

import pytest
from drawing import ids
from integrations.request_options.made_options import INVALID, OptionsDice

from kv_pool import (
    BlockHasher,
    BlockPool,
    BlockRetention,
    KVCacheManager,
    PinLimitError,
    Request,
    RetentionDirective,
)
from kv_pool.core import invariants
from kv_pool.integrations.vllm.request_options.handler import RequestOptionsHandler
from kv_pool.manager.retention.invariants import check_retention

HASHER = BlockHasher("sha256", "s", 4)
NUM_BLOCKS = 14
MAX_PINNED = 5
NUM_STEPS = 80
SEEDS = range(120)


class Model:
    """A manager whose retention the test calls with the directives that each JSON object stands for."""

    def __init__(self, clock):
        self.clock = clock
        self.pool = BlockPool(NUM_BLOCKS + 1, True, 4)
        self.retention = BlockRetention(self.pool, clock, max_pinned_blocks=MAX_PINNED)
        self.manager = KVCacheManager(self.pool, retention=self.retention)
        self.objects = {}  # request id -> its valid object and its directives
        self.refused = set()

    def make_directive(self, one):
        seconds = one.get("duration_ms")
        return RetentionDirective(
            one.get("token_start", 0),
            one.get("token_end"),
            one.get("priority", 35),
            None if seconds is None else seconds / 1000,
            one.get("pin", False),
        )

    def receive(self, request, value):
        if value in INVALID or not isinstance(value, dict):
            self.refused.add(request.request_id)
            return
        own = [self.make_directive(one) for one in value.get("token_range_retention_configs", [])]
        demoted = value.get("demote", [])
        demoted = [{}] if demoted is True else demoted
        own += [self.make_directive({**one, "priority": 0}) for one in demoted]
        if "decode_retention_priority" in value:
            own.append(RetentionDirective(request.num_tokens, None, value["decode_retention_priority"]))
        released = value.get("release", [])
        changes = (
            [RetentionDirective()] if released is True else [self.make_directive(one) for one in released]
        )
        changes += [self.make_directive({**one, "priority": 0}) for one in demoted]
        changes += [self.make_directive(one) for one in value.get("change", [])]
        if any(one.pin and one.end - one.start >= 4 * (MAX_PINNED + 1) for one in own + changes):
            self.refused.add(request.request_id)
            return
        try:
            self.retention.set_directives(request.request_id, own)
            if changes:
                self.retention.change_directives(request, changes)
        except PinLimitError:
            self.retention.set_directives(request.request_id, [])
            self.refused.add(request.request_id)
            return
        if "end_session" in value:
            self.retention.end_session(value["end_session"])
        self.objects[request.request_id] = value, own

    def end(self, request):
        value, _ = self.objects.pop(request.request_id, ({}, []))
        session = value.get("session")
        if session is not None:
            until = self.clock() + session["duration_ms"] / 1000
            self.retention.keep_session(session["id"], request, until, session.get("priority", 100))

    def restore(self, request, num_computed):
        """Set the directives of a preempted request again, without pins that its blocks have."""
        _, own = self.objects.get(request.request_id, ({}, []))
        left = []
        for one in own:
            start = max(one.start, num_computed // 4 * 4) if one.pin else one.start
            if not one.pin or start < one.end:
                left.append(RetentionDirective(start, one.end, one.priority, one.duration_s, one.pin))
        try:
            self.retention.set_directives(request.request_id, left)
        except PinLimitError:
            self.retention.set_directives(request.request_id, [one for one in left if not one.pin])
            self.refused.add(request.request_id)


class Life:
    """The same random schedule over a manager with a handler and over a model."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.dice = OptionsDice(self.rng, 16, 9000)
        self.now = 0.0
        self.pool = BlockPool(NUM_BLOCKS + 1, True, 4)
        self.manager = KVCacheManager(self.pool)
        self.refused = set()
        self.handler = RequestOptionsHandler(self.manager, self.tell_time, MAX_PINNED)
        self.model = Model(self.tell_time)
        self.waiting = []
        self.running = []
        self.reports = []
        self.number = 0

    def tell_time(self):
        return self.now

    def arrive(self):
        self.number += 1
        start = self.rng.choice([1000, 2000, 3000, 10_000 + 100 * self.number])
        tokens = range(start, start + self.rng.randrange(1, 18))
        session_id = self.rng.choice([None, None, "a", "b"])
        pair = [Request(f"r{self.number}", tokens, HASHER, session_id=session_id) for _ in range(2)]
        if self.rng.random() < 0.6:
            value = self.dice.draw()
            self.handler.receive(pair[0], value)
            self.model.receive(pair[1], value)
        self.waiting.append(pair)

    def admit(self):
        pair = self.waiting[0]
        results = []
        for manager, request in zip((self.manager, self.model.manager), pair, strict=True):
            prefix = manager.get_computed_blocks(request)
            num_new = min(request.num_tokens - prefix.num_tokens, 1 + self.number % 16)
            results.append((prefix.num_tokens, manager.allocate_slots(request, num_new, prefix) is not None))
            if results[-1][1]:
                request.num_computed_tokens = prefix.num_tokens + num_new
        assert results[0] == results[1]
        if results[0][1]:
            self.running.append(self.waiting.pop(0))

    def grow(self):
        pair = self.rng.choice(self.running)
        grown = []
        for manager, request in zip((self.manager, self.model.manager), pair, strict=True):
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids([self.number])
            num_new = request.num_tokens - request.num_computed_tokens
            grown.append(manager.allocate_slots(request, num_new) is not None)
            if grown[-1]:
                request.num_computed_tokens += num_new
        assert grown[0] == grown[1]

    def preempt(self):
        pair = self.running.pop(self.rng.randrange(len(self.running)))
        self.handler.note_preempted(pair[0])
        self.manager.free(pair[0])
        self.handler.note_freed(pair[0], will_return=True)
        self.model.manager.free(pair[1])
        self.model.restore(pair[1], pair[1].num_computed_tokens)
        for request in pair:
            request.num_computed_tokens = 0
        self.waiting.insert(0, pair)

    def end(self):
        pair = self.running.pop(self.rng.randrange(len(self.running)))
        report = self.handler.note_end(pair[0])
        self.manager.free(pair[0])
        self.handler.note_freed(pair[0])
        self.model.end(pair[1])
        self.model.manager.free(pair[1])
        if report is not None:
            self.refused |= {pair[0].request_id} if report.refused else set()
            self.reports.append(report)
            assert 0 <= report.retained_tokens <= pair[0].num_tokens

    def abort(self):
        ours, theirs = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        self.handler.note_freed(ours)
        self.model.objects.pop(theirs.request_id, None)
        self.model.retention.set_directives(theirs.request_id, [])

    def step(self):
        choices = [self.arrive, self.arrive]
        if self.waiting:
            choices += [self.admit, self.admit, self.abort]
        if self.running:
            choices += [self.grow, self.end, self.preempt]
        if self.rng.random() < 0.3:
            self.now += self.rng.choice([0.001, 0.5, 3.0])
        self.rng.choice(choices)()

    def check(self):
        invariants.check(self.pool)
        retention = self.manager.retention
        if retention is not None:
            check_retention(retention)
            assert retention.num_pins == self.model.retention.num_pins
            assert retention.list_sessions() == self.model.retention.list_sessions()
        assert ids(self.pool.free_block_queue.get_all_free_blocks()) == ids(
            self.model.pool.free_block_queue.get_all_free_blocks()
        )
        self.refused |= {name for name, kept in self.handler.by_request.items() if kept.report.refused}
        assert self.refused == self.model.refused
        open_ids = {pair[0].request_id for pair in (*self.waiting, *self.running)}
        assert self.handler.by_request.keys() <= open_ids


@pytest.mark.parametrize("seed", SEEDS)
def test_random_options_do_what_the_model_does(seed):
    life = Life(seed)
    for _ in range(NUM_STEPS):
        life.step()
        if life.manager.retention is not None:
            life.model.retention.expire()
            life.manager.retention.expire()
        life.check()
    for pair in life.running:
        life.handler.note_freed(pair[0])
    assert len(life.reports) > 0
