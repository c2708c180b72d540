"""Calls of a `GPUKVPool` to interrupt: sequences keep their blocks and bytes, and nothing leaks."""

from functools import partial

from adapter.made_pool import check, make, make_storage, read, take, write
from interrupt_cases.case import Case, Subject

from kv_pool import AllBlocksCleared, BlockAllocationRequest, LRUEviction
from kv_pool.manager.retention.directive import RetentionDirective

HASHES = [b"hash %d" % number for number in range(4)]
NUM_BLOCKS = 16


class Busy(Subject):
    """A pool with shared, pinned, high-priority and cached blocks, and a storage.

    Args:
        losing: sequences that may lose blocks by the call.
    """

    def __init__(self, losing=(), placement="oldest"):
        self.losing = losing
        self.pool = make(
            NUM_BLOCKS,
            storage=make_storage(NUM_BLOCKS + 4),
            eviction_policy=LRUEviction(),
            enable_kv_cache_events=True,
            placement=placement,
            on_moved=lambda relocation: None,
        )
        self.fill()
        self.contents = self.read_all()
        self.pins = {block: sum(pins.values()) for block, pins in self.pool.holdings.pins.owners.items()}

    def fill(self):
        pool = self.pool
        self.take(1, 4)
        pool.cache_prefix(1, HASHES[:3])
        pool.fork(1, 2, 3)
        self.take(3, 2, priority=2)
        pool.cache_prefix(3, [b"urgent"])
        pool.free_sequence(3)
        self.take(9, 1)
        pool.cache_prefix(9, [b"kept"])
        pool.retention.set_directives("9", [RetentionDirective(0, 4, pin=True)])
        pool.free_sequence(9)
        pool.retention.set_directives("2", [RetentionDirective(4, priority=80, duration_s=100.0)])
        self.take(4, 3)
        pool.pin(pool.blocks_of(4)[:1])
        pool.pin(pool.blocks_of(4)[1:2], 4)
        self.take(5, 2)
        pool.free(pool.blocks_of(5)[:1])
        pool.take_events()

    def take(self, sequence_id, num_blocks, **options):
        for position, block_id in enumerate(take(self.pool, sequence_id, num_blocks, **options)):
            write(self.pool, block_id, 16 * sequence_id + position)

    def read_all(self):
        return {sequence_id: read(self.pool, sequence_id) for sequence_id in self.pool.list_sequences()}

    # ---- what `try_case` calls -------------------------------------------------------------------

    def is_interrupted(self):
        return self.pool.block_pool.is_changing

    def call_next(self):
        take(self.pool, 90, 1)

    def repair(self):
        self.pool.repair()

    def check(self, is_repaired):
        pool = self.pool
        check(pool)
        assert not pool.holdings.frozen
        assert {hold.reason for hold in pool.block_pool.holds.list_holds() if hold.blocks} <= {
            "pinned",
            "pinned by a directive",
        }
        left = self.read_all()
        for sequence_id, numbers in self.contents.items():
            if sequence_id in self.losing:
                assert set(left.get(sequence_id, ())) <= set(numbers)
            else:  # blocks of the call may have been added
                assert left[sequence_id][: len(numbers)] == numbers
        for block, count in self.pins.items():
            if not self.losing:
                assert sum(pool.holdings.pins.owners[block].values()) >= count
        if is_repaired:
            assert not len(pool.block_pool.cached_block_hash_to_block)
            assert sum(isinstance(event, AllBlocksCleared) for event in pool.take_events()) >= 1
        for sequence_id in pool.list_sequences():
            pool.unpin([one for one in pool.blocks_of(sequence_id) if pool.get_block_info(one).is_pinned])
        for sequence_id in pool.list_sequences():
            for block_id in pool.blocks_of(sequence_id):
                while pool.get_block_info(block_id).is_pinned:
                    pool.unpin([block_id])
            pool.free_sequence(sequence_id)
        pool.retention.release_all()
        assert pool.get_free_blocks() == pool.total_blocks


CALLS = {
    "allocate": lambda pool: take(pool, 6, 3),
    "allocate, growing": lambda pool: take(pool, 1, 2),
    "allocate, growing and pinned": lambda pool: take(pool, 1, 2, pinned=True),
    "allocate, pinned": lambda pool: take(pool, 6, 2, pinned=True),
    "allocate, all": lambda pool: take(pool, 6, pool.get_free_blocks(), contiguous="no"),
    "allocate_many": lambda pool: pool.allocate_many(
        [BlockAllocationRequest(2, 6), BlockAllocationRequest(1, 7, pinned=True)]
    ),
    "fork": lambda pool: pool.fork(1, 8),
    "claim_prefix": lambda pool: pool.claim_prefix(8, HASHES),
    "claim_prefix, free": lambda pool: pool.claim_prefix(8, [b"urgent"]),
    "claim_prefix, kept": lambda pool: pool.claim_prefix(8, [b"kept"]),
    "cache_prefix": lambda pool: pool.cache_prefix(1, HASHES),
    "pin": lambda pool: pool.pin([*pool.blocks_of(1), pool.blocks_of(4)[0]]),
    "pin, by one": lambda pool: pool.pin(pool.blocks_of(1), 1),
    "note_access": lambda pool: pool.note_access(1),
    "take_evictions": lambda pool: pool.take_evictions(),
    "defragment": lambda pool: pool.defragment(),
    "grow": lambda pool: pool.grow(3),
    "shrink": lambda pool: pool.shrink(2),
}
LOSING_CALLS = {
    "free": lambda pool: pool.free(pool.blocks_of(1)[1:]),
    "free, by one": lambda pool: pool.free(pool.blocks_of(2)[1:], 2),
    "free_sequence": lambda pool: pool.free_sequence(1),
    "free_sequence, directives": lambda pool: pool.free_sequence(2),
    "evict": lambda pool: pool.evict(4),
    "allocate, evicting": lambda pool: take(pool, 6, pool.get_free_blocks() + 2),
    "allocate, a run": lambda pool: take(pool, 6, 6, contiguous="require"),
    "unpin": lambda pool: pool.unpin(pool.blocks_of(4)[:2]),
}


def call_pool(call, subject):
    return call(subject.pool)


CASES = [
    *(Case(f"GPUKVPool.{name}", Busy, partial(call_pool, call)) for name, call in CALLS.items()),
    *(
        Case(f"GPUKVPool.{name}", partial(Busy, (1, 2, 4, 5)), partial(call_pool, call))
        for name, call in LOSING_CALLS.items()
    ),
    Case(
        "GPUKVPool.allocate, a chunk",
        partial(Busy, placement="buddy"),
        partial(call_pool, CALLS["allocate"]),
    ),
]
