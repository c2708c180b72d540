"""Random schedules on two devices: every token equals the dense run's, despite moved blocks."""

import random
from collections import Counter

import pytest
from integrations.transformers.made_model import (
    check_kv,
    generate_dense,
    make_model,
    make_request,
    make_sequences,
    make_tiers,
    run_step,
)
from integrations.transformers.moved_blocks import crowd_out, move_blocks, spoil_empty

from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.contiguous.invariants import check
from kv_pool.tiers.invariants import check as check_tiers

pytestmark = pytest.mark.transformers

NUM_ACTIONS, MOST_TOKENS, MAX_RUNNING = 500, 12, 6
DEVICES = [("cpu", "cpu"), pytest.param(("cpu", "cuda:0"), marks=pytest.mark.gpu)]


class RandomEngine:
    """Two devices, each with a model, a pool and a storage, that run and move random requests."""

    def __init__(self, seed, devices, attention, write, folder):
        self.rng = random.Random(seed)
        self.gathers = attention != "kv_pool"
        self.models = [make_model(attention, device) for device in devices]
        layouts = self.rng.choice([("NHD", "BLNHC"), ("BLNHC", "NHD"), ("FLASH", "SGLANG"), ("NHD", "NHD")])
        # With tiers, devices and host are small, so that blocks reach the disk.
        self.has_tiers = write is not None
        sizes = (28, 22) if self.has_tiers else (40, 30)
        self.devices = [
            make_sequences(
                num_blocks,
                layout,
                model,
                add_tiers=None if write is None else make_tiers(8, 40, folder / str(num_blocks), write),
            )
            for num_blocks, layout, model in zip(sizes, layouts, self.models, strict=True)
        ]
        self.defragmenters = [
            Defragmenter(sequences, threshold=0.2, interval_s=0, max_moves=3) for sequences in self.devices
        ]
        self.running = [[], []]
        self.waiting = []
        self.all = []
        self.tally = Counter()
        self.prefixes = [[self.rng.randrange(97) for _ in range(14)] for _ in range(2)]

    def draw(self):
        """Return a random device and one of its requests."""
        side = self.rng.choice([side for side in (0, 1) if self.running[side]] or [None])
        return (None, None) if side is None else (side, self.rng.choice(self.running[side]))

    def submit(self):
        prompt = self.rng.choice(self.prefixes)[: self.rng.choice([5, 8, 12, 14])]
        prompt = prompt + [self.rng.randrange(97) for _ in range(self.rng.randint(1, 6))]
        self.waiting.append(make_request(f"r{len(self.all)}", prompt))
        self.all.append(self.waiting[-1])

    def admit(self):
        side = self.rng.randrange(2)
        if self.waiting and len(self.running[side]) < MAX_RUNNING:
            num_tokens = self.devices[side].admit(self.waiting[0])
            if num_tokens is not None:
                self.running[side].append(self.waiting.pop(0))
                self.tally["hit tokens"] += num_tokens

    def step(self):
        """Run one forward pass of some requests, mixing prompt chunks and decodes."""
        side, _ = self.draw()
        if side is None:
            return
        rows = self.rng.sample(self.running[side], self.rng.randint(1, len(self.running[side])))
        counts = [
            self.rng.randint(max(1, left - 3), left)
            for left in (request.num_tokens - request.num_computed_tokens for request in rows)
        ]
        rows = [
            (request, count)
            for request, count in zip(rows, counts, strict=True)
            if self.devices[side].reserve(request, count)
        ]
        if rows:
            run_step(self.models[side], self.devices[side], *map(list, zip(*rows, strict=True)), self.gathers)
            self.tally["steps"] += 1
        else:
            self.preempt()
        for request in list(self.running[side]):
            if request.num_tokens - request.num_prompt_tokens >= MOST_TOKENS:
                self.running[side].remove(request)
                self.devices[side].free(request)
                self.tally["finished"] += 1

    def preempt(self):
        side, request = self.draw()
        if request is not None:
            self.running[side].remove(request)
            self.devices[side].free(request)
            self.waiting.append(request)
            self.tally["preempted"] += 1

    def fork(self):
        side, request = self.draw()
        if request is None or not request.num_computed_tokens or len(self.running[side]) >= MAX_RUNNING:
            return
        token_ids = request.all_token_ids[: request.num_computed_tokens]
        child = make_request(f"r{len(self.all)}", [*token_ids, self.rng.randrange(97)])
        self.devices[side].fork(request, child)
        self.all.append(child)
        self.running[side].append(child)
        self.tally["forked"] += 1

    def migrate(self):
        side, request = self.draw()
        if request is not None and self.devices[side].migrate(request, self.devices[1 - side]):
            self.running[side].remove(request)
            self.running[1 - side].append(request)
            self.tally["migrated"] += 1

    def evict(self):
        pool = self.rng.choice(self.devices).manager.block_pool
        cached = [block.block_id for block in pool.blocks if block.block_hash]
        chosen = self.rng.sample(cached, self.rng.randint(0, len(cached)) // 2)
        pool.evict_blocks(chosen)
        self.tally["evicted"] += len(chosen)

    def scatter(self):
        self.tally["scattered"] += move_blocks(self.rng, self.rng.choice(self.devices))

    def pack(self):
        sequences = self.rng.choice(self.devices)
        max_evictions, max_moves = self.rng.choice([(0, None), (0, 2), (3, None)])
        self.tally["packed"] += sequences.defragment(max_evictions, max_moves)
        spoil_empty(sequences)

    def gather(self):
        """Defragment a few blocks, as an engine does between two steps."""
        self.tally["gathered"] += self.rng.choice(self.defragmenters).step()

    def crowd_out(self):
        """Move all free cached blocks to the tiers."""
        crowd_out(self.rng.choice(self.devices))

    def take_run(self):
        """Take a run, overwrite it and free it."""
        sequences = self.rng.choice(self.devices)
        pool = sequences.manager.block_pool
        epoch = pool.epoch
        run = sequences.take_run(min(self.rng.randint(2, 6), pool.get_num_free_blocks()))
        if run:
            first = run[0].block_id
            assert [block.block_id for block in run] == list(range(first, first + len(run)))
            for block in run:
                sequences.storage.write_block(block.block_id, b"\xff" * sequences.storage.block_bytes)
            pool.free_blocks(run)
            self.tally["runs made"] += pool.epoch > epoch


@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
@pytest.mark.parametrize("attention", ["sdpa", "kv_pool"])
@pytest.mark.parametrize("seed", range(10), ids=lambda seed: f"seed{seed}")
def test_every_token_equals_the_dense_run(seed, attention, devices):
    generate_at_random(RandomEngine(seed, devices, attention, None, None), NUM_ACTIONS)


@pytest.mark.parametrize("devices", DEVICES, ids="-".join)
@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("seed", range(4), ids=lambda seed: f"seed{seed}")
def test_every_token_equals_the_dense_run_with_lower_tiers(seed, write, devices, tmp_path):
    engine = RandomEngine(seed, devices, "sdpa", write, tmp_path)
    generate_at_random(engine, 2 * NUM_ACTIONS)  # more of them would undo the other operations
    read = Counter()
    for sequences in engine.devices:
        check_tiers(sequences.onboarder)
        read.update(sequences.onboarder.get_statistics().num_tokens_by_medium)
    assert min(read[medium] for medium in ("GPU", "CPU", "STORAGE")) > 0


def generate_at_random(engine, num_actions):
    actions = [engine.submit, engine.admit, engine.admit, engine.step, engine.step, engine.step]
    actions += [engine.preempt, engine.fork, engine.migrate, engine.evict, engine.scatter]
    actions += [engine.pack, engine.gather, engine.take_run]
    if engine.has_tiers:
        actions += [engine.crowd_out, engine.preempt]
    for _ in range(8):
        engine.submit()
    for _ in range(num_actions):
        engine.rng.choice(actions)()
        for sequences in engine.devices:
            check(sequences.manager.block_pool)
    for side, sequences in enumerate(engine.devices):
        for request in engine.running[side]:
            check_kv(sequences, request)
    num_tokens = 0
    for request in engine.all:
        generated = request.all_token_ids[request.num_prompt_tokens :]
        prompt = tuple(request.all_token_ids[: request.num_prompt_tokens])
        assert generated == generate_dense(prompt, MOST_TOKENS)[: len(generated)]
        num_tokens += len(generated)
    happened = {what for what in engine.tally if engine.tally[what] > 1}
    assert happened >= {
        "hit tokens",
        "steps",
        "finished",
        "preempted",
        "forked",
        "migrated",
        "scattered",
        "packed",
        "gathered",
        "evicted",
    }
    assert num_tokens > 200
