"""Compactions to interrupt: blocks in use keep their bytes, wherever they are."""

from contiguous.slot_engine import SlotEngine, make_run_pool
from interrupt_cases.case import Case

from kv_pool.contiguous import compaction, invariants
from kv_pool.contiguous.plan import plan_pack

PICTURE = "free: 8* 1* 2* 3 9* | in use: 4*x2 5 6* 7"


class Slots:
    """A pool with moves and exchanges to make, and the content of each block object."""

    def __init__(self):
        self.pool = make_run_pool(PICTURE, enable_kv_cache_events=True)
        self.engine = SlotEngine(self.pool)
        self.engine.write(self.pool.blocks, "slot")
        self.contents = {block: f"slot/{block.block_id}" for block in self.pool.blocks}
        self.references = {block: block.ref_cnt for block in self.pool.blocks}
        self.planned = plan_pack(self.pool)
        assert len(self.planned) == 5

    def pack(self):
        compaction.pack(self.pool, self.engine.copy, scratch_ids=(90, 91))

    def apply(self):
        compaction.apply_moves(self.pool, self.planned, self.engine.copy, scratch_ids=(90, 91))

    def take_run(self):
        run = compaction.take_run(self.pool, 4, self.engine.copy, lambda relocation: None)
        self.pool.free_blocks(run)

    def shrink(self):
        compaction.shrink(self.pool, 3, self.engine.copy)

    def is_interrupted(self):
        return self.pool.is_changing

    def call_next(self):
        self.apply()

    def repair(self):
        self.pool.repair(block for block, count in self.references.items() for _ in range(count))

    def check(self, is_repaired):
        """Blocks in use keep their bytes, and keys find theirs."""
        pool = self.pool
        if not is_repaired:  # a run that was taken belongs to the interrupted caller
            for block in pool.blocks:
                if block.ref_cnt > self.references[block]:
                    pool.free_blocks([block])
        invariants.check(pool)
        for block, content in self.contents.items():
            assert block.ref_cnt == self.references[block]
            if block.ref_cnt or block.block_hash is not None:
                assert self.engine.slots[block.block_id] == content
        if is_repaired:
            assert not len(pool.cached_block_hash_to_block)
        self.pack()
        assert all(
            self.engine.slots[block.block_id] == content
            for block, content in self.contents.items()
            if block.ref_cnt
        )
        assert len(pool.list_free_runs()) <= 1

    def close(self):
        pass


CASES = [
    Case(f"compaction.{call.__name__}", Slots, call)
    for call in (Slots.apply, Slots.pack, Slots.take_run, Slots.shrink)
]
