"""A compaction interrupted by a signal handler, once or twice: bytes and ids agree afterwards."""

import random

import numpy as np  # noqa: F401 (an interrupted import cannot be repeated)
import pytest
from contiguous.slot_engine import SlotEngine, make_run_pool
from drawing import ids
from interrupting import interrupt_everywhere, interrupt_twice, interrupt_twice_at_random

from kv_pool.contiguous import compaction, invariants
from kv_pool.contiguous.plan import plan_pack

PICTURE = "free: 8* 1* 2* 3 9* | in use: 4*x2 5 6* 7"


class Subject:
    """A pool with its engine, and the content of each block object."""

    def __init__(self, picture=PICTURE):
        self.pool = make_run_pool(picture, enable_kv_cache_events=True)
        self.engine = SlotEngine(self.pool)
        self.engine.write(self.pool.blocks, "slot")
        self.contents = {block: f"slot/{block.block_id}" for block in self.pool.blocks}
        self.keys = {block: block.block_hash for block in self.pool.blocks}
        self.references = {block: block.ref_cnt for block in self.pool.blocks}
        self.queue = self.list_free()
        self.by_id = {block: block.block_id for block in self.pool.blocks}
        self.told = 0
        self.planned = plan_pack(self.pool)
        assert len(self.planned) == 5

    def list_free(self):
        return self.pool.free_block_queue.get_all_free_blocks()

    def note_moved(self, relocation):
        remap = relocation.make_remap().tolist()
        self.by_id = {block: remap[block_id] for block, block_id in self.by_id.items()}
        self.told += 1

    def pack(self):
        compaction.pack(self.pool, self.engine.copy, on_moved=self.note_moved, scratch_ids=(90, 91))

    def apply(self):
        compaction.apply_moves(
            self.pool, self.planned, self.engine.copy, on_moved=self.note_moved, scratch_ids=(90, 91)
        )

    def check(self):
        """Blocks in use keep their bytes, keys find theirs; at most one batch of cached blocks is lost."""
        pool = self.pool
        pool.get_new_blocks(0)
        invariants.check(pool)
        num_lost = 0
        for block, content in self.contents.items():
            assert block.ref_cnt == self.references[block]
            if block.ref_cnt or block.block_hash is not None:
                assert self.engine.slots[block.block_id] == content
            if block.block_hash != self.keys[block]:
                assert block.block_hash is None
                assert not block.ref_cnt
                num_lost += 1
        assert num_lost <= 2
        assert num_lost == len(pool.take_events()) == pool.num_evictions
        assert self.list_free() == self.queue


def test_an_interrupt_loses_no_block_in_use():
    tried, broken = interrupt_everywhere(Subject, Subject.apply, Subject.check)
    assert tried > 30
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def test_the_next_compaction_completes_an_interrupted_one():
    def check(subject):
        subject.check()
        subject.pool.take_events()
        subject.pack()
        invariants.check(subject.pool)
        assert subject.pool.list_free_runs() == [5]

    tried, broken = interrupt_everywhere(Subject, Subject.apply, check)
    assert tried > 30
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def test_an_interrupted_recovery_loses_no_block_in_use():
    tried, broken = interrupt_twice_at_random(
        Subject, Subject.apply, Subject.check, random.Random(7), num_pairs=300
    )
    assert tried > 30
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


@pytest.mark.slow
def test_two_interrupts_lose_no_block_in_use():
    def watch(subject, second):
        rebuild = subject.pool.rebuild_index

        def rebuild_and_raise():
            second()
            rebuild()

        subject.pool.rebuild_index = rebuild_and_raise

    tried, broken = interrupt_twice(Subject, Subject.apply, Subject.check, watch, step=2, second_step=3)
    assert tried > 100
    assert not broken, f"{len(broken)} of {tried}: {broken[:3]}"


def test_without_an_interrupt_the_subject_is_packed():
    subject = Subject()
    subject.pack()
    subject.check()
    assert subject.told > 0
    for block in subject.pool.blocks:
        if block.ref_cnt or block.block_hash is not None:
            assert subject.by_id[block] == block.block_id
    assert subject.pool.num_evictions == 0
    assert ids(subject.pool.blocks) == list(range(10))
    assert subject.pool.list_free_runs() == [5]
