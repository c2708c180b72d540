"""Random lives of the two halves: loaded bytes against a slow model, and the tiers against the index."""

import random

import pytest
from integrations.vllm_connector.made_halves import Halves


class Life:
    """Requests that share prefixes, on a small pool; the model is the content of each key.

    Attributes:
        stored: keys that were computed at some time, so that a hit may have them.
    """

    def __init__(self, folder, seed):
        self.rng = rng = random.Random(seed)
        windows = rng.choice([(None,), (None,), (9,), (None, 9), (None, 5, 13)])
        self.halves = Halves(
            folder,
            windows,
            num_blocks=rng.randrange(16, 40) * len(windows),
            host=rng.randrange(1, 30),
            disk=rng.choice([0, rng.randrange(1, 60)]),
            num_ranks=rng.choice([1, 1, 2]),
        )
        self.families = [[f"{name} {number}".encode() for number in range(9)] for name in "abcd"]
        self.running = {}
        self.loading = {}
        self.stored = set()
        self.num_loaded = 0
        self.number = 0

    def run(self, num_steps):
        actions = [self.start, self.start, self.compute, self.compute, self.end, self.break_block, self.reset]
        for _ in range(num_steps):
            self.rng.choices(actions, [4, 4, 6, 6, 3, 0.5, 0.1])[0]()
            self.take(self.halves.step(list(self.running), self.rng.random() < 0.5))
        while self.running or self.loading:
            for name in list(self.running):
                self.finish(name)
            self.take(self.halves.step())
        self.halves.drain()
        self.check_at_rest()

    def start(self):
        family = self.rng.choice(self.families)[: self.rng.randrange(1, 10)]
        own = [f"{self.number} {number}".encode() for number in range(self.rng.randrange(3))]
        request = self.halves.make_request(f"r{self.number}", [*family, *own])
        self.number += 1
        num_hit = self.halves.admit(request)
        if num_hit is None:
            self.halves.scheduler.finish_request(request, [[] for _ in self.halves.groups])
        elif num_hit:
            for group in self.halves.groups:
                first = group.list_needed(0, num_hit).start
                assert set(group.list_keys(request, first, num_hit // 4)) <= self.stored
            self.loading[request.request_id] = request
        else:
            self.running[request.request_id] = request

    def take(self, ended):
        """Go on with requests whose loads have ended; a failed one starts again from its first token."""
        for name, has_failed in ended.items():
            request = self.loading.pop(name)
            if has_failed:
                request.num_computed_tokens = 0
                if any(0 in table for table in self.halves.tables[name]):  # blocks before a window
                    self.halves.finish(request)
                    continue
            else:
                self.halves.cache_loaded(request)
                self.num_loaded += request.num_computed_tokens
            self.running[name] = request

    def compute(self):
        if self.running:
            request = self.running[self.rng.choice(sorted(self.running))]
            done = request.num_computed_tokens // 4
            num_blocks = min(len(request.block_hashes), done + self.rng.randrange(1, 5))
            if num_blocks > done:
                self.halves.compute(request, num_blocks)
                for group in self.halves.groups:
                    self.stored.update(group.list_keys(request, done, num_blocks))

    def end(self):
        if self.running:
            self.finish(self.rng.choice(sorted(self.running)))

    def finish(self, name):
        self.halves.finish(self.running.pop(name))

    def break_block(self):
        """Remove a block from the tiers of a rank behind the index's back."""
        worker = self.rng.choice(self.halves.workers)
        assert worker.wait(60)
        keys = worker.stack.tiers[0].list_keys()
        if keys:
            worker.stack.remove([self.rng.choice(keys)])

    def reset(self):
        assert self.halves.scheduler.reset() is not bool(self.loading)

    def check_at_rest(self):
        halves = self.halves
        index = halves.index
        assert halves.pool.get_num_free_blocks() == halves.pool.num_gpu_blocks - 1
        assert not halves.pool.holds.list_holds()
        assert index.num_arriving == 0
        assert index.host.list_next_evicted(1000) == index.host.list_keys()  # nothing is held
        for worker in halves.workers:
            for tier, planned in zip(worker.stack.tiers, index.tiers, strict=True):
                assert set(tier.list_keys()) <= set(planned.list_keys())


@pytest.mark.parametrize("seed", range(40))
def test_random_life(tmp_path, seed):
    life = Life(tmp_path, seed)
    try:
        life.run(150)
    finally:
        life.halves.close()


def test_random_lives_load_blocks(tmp_path):
    life = Life(tmp_path, 3)
    life.run(300)
    life.halves.close()
    assert life.num_loaded > 300
    assert life.halves.scheduler.take_counts()["demoted blocks"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400))
def test_many_random_lives(tmp_path, seed):
    test_random_life(tmp_path, seed)
