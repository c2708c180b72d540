"""Random migrations in both directions with compactions between their phases; bytes are derived from tokens.

The test drives each migration step by step like a migrator, with leases on both sides. Like a network card,
it reads and writes at the block ids that it got at the start.
"""

import random

import pytest
from adapter.made_pool import make_site
from migration.made_nodes import BLOCK_SIZE, HASHER, MadeEngine

from kv_pool import BlockAllocationRequest, GPUKVPool, LeaseKind
from kv_pool.contiguous import compaction, invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.errors import OutOfBlocksError
from kv_pool.migration.subjects import PrefixSubject, SequenceSubject

NUM_BLOCKS = 24
FOREVER = float("inf")
# Few prompts with common prefixes, so that the target already has many of the offered blocks.
PROMPTS = [[*range(first), *range(50, 50 + length)] for first in (0, 4, 8) for length in (4, 9, 16, 22)]


class ManagerNode:
    """A `KVCacheManager` and its site."""

    def __init__(self):
        self.engine = MadeEngine(NUM_BLOCKS + 1, pool_class=RunBlockPool)
        self.site = self.engine.site
        self.pool = self.engine.pool

    def start(self, number, token_ids):
        if self.pool.get_num_free_blocks() > len(token_ids) // BLOCK_SIZE:
            self.engine.start(str(number), token_ids)

    def finish(self, number):
        self.engine.finish(str(number))

    def list_sequences(self):
        return [int(name) for name in self.engine.manager.list_request_ids()]

    def defragment(self, max_moves):
        compaction.pack(self.pool, self.site.storage.apply_moves, max_moves=max_moves, max_evictions=3)

    def check(self):
        for name in self.engine.manager.list_request_ids():
            self.engine.check_bytes(name)
        self.engine.check_all_cached(PROMPTS)


class PoolNode:
    """A `GPUKVPool` and its site; `tokens` identifies the sequences."""

    def __init__(self):
        self.engine = MadeEngine(NUM_BLOCKS + 1)  # provides the storage and its bytes
        self.gpu_pool = GPUKVPool(
            NUM_BLOCKS, BLOCK_SIZE, storage=self.engine.storage, on_moved=lambda relocation: None
        )
        self.pool = self.engine.pool = self.gpu_pool.block_pool
        self.site = make_site(self.gpu_pool, hasher=HASHER)
        self.tokens = {}

    def start(self, number, token_ids):
        num_blocks = -(-len(token_ids) // BLOCK_SIZE)
        if self.gpu_pool.get_free_blocks() < num_blocks:
            return
        hashes = HASHER.hash_blocks(token_ids)
        num_hits = len(self.gpu_pool.claim_prefix(number, hashes))
        if num_blocks > num_hits:
            self.gpu_pool.allocate(BlockAllocationRequest(num_blocks - num_hits, number))
        self.tokens[number] = token_ids
        for content, block_id in list(self.list_contents(number))[num_hits:]:
            self.engine.storage.write_block(block_id, self.engine.make_bytes(content))
        self.gpu_pool.cache_prefix(number, hashes)

    def finish(self, number):
        self.gpu_pool.free_sequence(number)

    def list_sequences(self):
        frozen = self.gpu_pool.holdings.frozen
        return [number for number in self.gpu_pool.list_sequences() if number not in frozen]

    def list_contents(self, number):
        for position, block_id in enumerate(self.gpu_pool.blocks_of(number)):
            yield f"0 {self.tokens[number][: (position + 1) * BLOCK_SIZE]}", block_id

    def defragment(self, max_moves):
        self.gpu_pool.defragment(max_moves=max_moves, max_evictions=3)

    def check(self):
        for number in self.gpu_pool.list_sequences():
            for content, block_id in self.list_contents(number):
                assert self.engine.read(block_id) == self.engine.make_bytes(content), f"block {block_id}"
        self.engine.check_all_cached(PROMPTS)


def compact(draw, node):
    """Run one of the calls that change block ids."""
    pool, copy = node.pool, node.site.storage.apply_moves
    limits = {"max_moves": draw.choice([None, 1, 3]), "max_evictions": draw.choice([0, 3])}
    match draw.choice(["pack", "gather", "run", "shrink", "defragment"]):
        case "pack":
            compaction.pack(pool, copy, **limits)
        case "gather":
            compaction.gather(pool, copy, run_length=draw.choice([2, 4]), **limits)
        case "run":
            num_blocks = draw.randint(1, 6)
            if num_blocks <= pool.get_num_free_blocks():
                run = compaction.take_run(pool, num_blocks, copy, lambda relocation: None)
                pool.free_blocks(run or [])
        case "shrink":
            try:
                compaction.shrink(pool, 2, copy)
            except ValueError:  # held blocks above the limit, or too few free blocks below it
                return
            pool.grow(2)
        case "defragment":
            node.defragment(limits["max_moves"])


class Moving:
    """One migration: its subject, its block ids and its remaining steps."""

    def __init__(self, source, target, subject, is_move):
        self.source, self.target, self.subject, self.is_move = source, target, subject, is_move
        self.selection = source.site.select(subject, is_move)
        blocks = self.selection.blocks
        self.lease = source.site.leases.acquire(blocks, FOREVER, "the target") if blocks else None
        if is_move:
            source.site.freeze(subject)
        self.reservation = self.write_lease = None
        self.pairs = []
        self.steps = [self.reserve, self.read, self.read, self.insert, self.acknowledge, self.adopt]

    def reserve(self):
        site = self.target.site
        offered = self.selection.offered
        reservation = self.reservation = site.reserve(self.subject, offered, self.selection.state)
        missing = [reservation.blocks[at] for at in reservation.missing]
        self.ids = [block.block_id for block in reservation.blocks]
        self.pairs = [(offered[at].block_id, reservation.blocks[at].block_id) for at in reservation.missing]
        if missing:
            self.write_lease = site.leases.acquire(missing, FOREVER, "the read", LeaseKind.WRITE)

    def read(self):
        """Copy the first half of the blocks, then the second half."""
        part = self.pairs[::2] if self.steps[0] == self.read else self.pairs[1::2]
        self.source.site.storage.copy_to(self.target.site.storage, part)

    def insert(self):
        if self.write_lease is not None:
            self.write_lease.release()
            self.write_lease = None
        self.target.site.insert(self.reservation)

    def acknowledge(self):
        if self.is_move:
            self.source.site.release(self.subject, "target")
        self.give_lease_back()

    def adopt(self):
        reservation, self.reservation = self.reservation, None
        self.held = None
        if reservation.blocks:
            self.held = self.target.site.leases.acquire(reservation.blocks, FOREVER, "hold_s")
        if isinstance(self.subject, SequenceSubject) and isinstance(self.target, PoolNode):
            number = self.subject.sequence_id
            self.target.tokens[number] = self.source.tokens[number]
        self.target.site.adopt(reservation)
        assert [block.block_id for block in reservation.blocks] == self.ids
        return self.held

    def break_off(self):
        if self.reservation is not None:
            if self.write_lease is not None:
                self.write_lease.release()
            self.target.site.release_reservation(self.reservation)
        if self.is_move:
            self.source.site.thaw(self.subject)
        self.give_lease_back()

    def give_lease_back(self):
        if self.lease is not None:
            self.lease.release()


def live(seed, make_node, num_steps):
    draw = random.Random(seed)
    nodes = [make_node(), make_node()]
    movings, held = [], []
    num_done = 0
    for number in range(num_steps):
        node = draw.choice(nodes)
        match draw.choice(
            ["start", "start", "finish", "begin", "go on", "go on", "compact", "depart", "use"]
        ):
            case "start":
                node.start(number, draw.choice(PROMPTS))
            case "finish" if sequences := node.list_sequences():
                node.finish(draw.choice(sequences))
            case "begin" if len(movings) < 4 and (sequences := node.list_sequences()):
                subject = SequenceSubject(draw.choice(sequences))
                if draw.random() < 0.5:
                    subject = PrefixSubject(tuple(HASHER.hash_blocks(draw.choice(PROMPTS))))
                is_move = isinstance(subject, SequenceSubject)
                movings.append(Moving(node, nodes[nodes[0] is node], subject, is_move))
            case "go on" if movings:
                moving = draw.choice(movings)
                step = moving.steps.pop(0)
                try:
                    lease = step()
                except OutOfBlocksError:
                    moving.break_off()
                    movings.remove(moving)
                if not moving.steps:
                    movings.remove(moving)
                    num_done += 1
                    held += [(lease, moving.ids)] if lease else []
            case "depart" if movings and draw.random() < 0.3:
                moving = draw.choice(movings)
                if len(moving.steps) > 1:  # before the source has released the subject
                    moving.break_off()
                    movings.remove(moving)
            case "use" if held:
                held.pop(draw.randrange(len(held)))[0].release()
            case "compact":
                compact(draw, node)
        for node in nodes:
            invariants.check(node.pool)
            node.check()
        for lease, ids in held:
            assert [block.block_id for block in lease.blocks] == ids
    assert num_done > num_steps // 60


@pytest.mark.parametrize("make_node", [ManagerNode, PoolNode])
@pytest.mark.parametrize("seed", range(6))
def test_compaction_during_migrations_keeps_content_correct(seed, make_node):
    live(seed, make_node, 400)


@pytest.mark.night
@pytest.mark.parametrize("make_node", [ManagerNode, PoolNode])
@pytest.mark.parametrize("seed", range(6, 16))
def test_compaction_during_many_migrations_keeps_content_correct(seed, make_node):
    live(seed, make_node, 4000)
