"""The changing calls of pools."""

from collections import Counter

from interrupt_cases.case import Case, Subject

from kv_pool import BlockHasher, BlockPool, Request
from kv_pool.contiguous import invariants as run_invariants
from kv_pool.contiguous.run_pool import RunBlockPool
from kv_pool.core import invariants
from kv_pool.core.eviction_order import BandPolicy
from kv_pool.core.holds import Hold

HASHER = BlockHasher("sha256", "s", 4)


class Pooling(Subject):
    """A pool of 20 blocks, some cached, some free, some in use; `held` are the references of its user."""

    def __init__(self, kind, **options):
        pool_type = RunBlockPool if kind == "runs" else BlockPool
        self.pool = pool_type(20, True, 4, enable_kv_cache_events=True, **options)
        if kind == "bands":
            self.pool.open_bands(Halves(self.pool))
        self.held = []
        self.hold = None
        first = self.run("a", range(24))
        self.run("b", [*range(8), *range(40, 48)])
        self.drop(first)
        self.hold = self.pool.hold(self.held[:2], "sent")
        self.pool.unpin_blocks([self.take(1)[0]], lambda block: None)

    def take(self, num_blocks):
        taken = self.pool.get_new_blocks(num_blocks)
        return taken

    def run(self, name, tokens):
        self.request = Request(name, tokens, HASHER)
        hashes = self.request.block_hashes
        found = self.pool.find_cached_prefix(hashes, len(hashes))
        self.pool.touch(found)
        blocks = [*found, *self.pool.get_new_blocks(len(hashes) - len(found))]
        self.pool.cache_full_blocks(self.request, blocks, len(found), len(hashes), 4, 0)
        self.held += blocks
        return blocks

    def drop(self, blocks):
        for block in blocks:
            self.held.remove(block)
        self.pool.free_blocks(blocks[::-1])

    def is_interrupted(self):
        return self.pool.is_changing

    def call_next(self):
        self.pool.free_blocks(self.pool.get_new_blocks(1))

    def repair(self):
        self.pool.repair(self.held)

    def check(self, is_repaired):
        (run_invariants if isinstance(self.pool, RunBlockPool) else invariants).check(self.pool)
        wanted = Counter(self.held)
        wanted.update(self.pool.holds.count_references())
        for block, count in wanted.items():
            assert block.ref_cnt >= count, f"block {block.block_id} has lost a reference"
        assert sum(block.ref_cnt for block in self.pool.blocks) <= sum(wanted.values()) + 12
        if is_repaired:
            assert {block: block.ref_cnt for block in self.pool.blocks if block.ref_cnt} == wanted
            assert not self.pool.cached_block_hash_to_block.entries


class Halves(BandPolicy):
    """Odd blocks go to a band of their own."""

    def __init__(self, pool):
        self.pool = pool

    def place(self, freed):
        odd = [block for block in freed if block.next_free_block is not None and block.block_id % 2]
        self.pool.place_in_band(odd, 5)

    def note_reset(self):
        pass

    def note_removed(self, blocks):
        pass


def cache_end(subject):
    [block] = subject.pool.get_new_blocks(1)
    subject.pool.cache_full_blocks(Request("z", range(90, 94), HASHER), [block], 0, 1, 4, 0)


def open_hold(subject):
    assert isinstance(subject.pool.hold(subject.held[1:4], "leased"), Hold)


def reset(subject):
    subject.hold.release()
    subject.pool.free_blocks(subject.held)
    subject.held = []
    assert subject.pool.reset_prefix_cache()


def look_up(subject):
    hashes = Request("c", range(20), HASHER).block_hashes
    subject.pool.touch(subject.pool.find_cached_prefix(hashes, 4))


CALLS = {
    "get_new_blocks": lambda subject: subject.pool.get_new_blocks(9),
    "touch": look_up,
    "free_blocks": lambda subject: subject.pool.free_blocks(subject.pool.get_new_blocks(2)),
    "take_blocks": lambda subject: subject.pool.take_blocks(
        subject.pool.free_block_queue.get_all_free_blocks()[2:6]
    ),
    "cache_full_blocks": cache_end,
    "evict_blocks": lambda subject: subject.pool.evict_blocks([1, 2, 3, 4]),
    "reset_prefix_cache": reset,
    "swap_block_ids": lambda subject: subject.pool.swap_block_ids([(5, 12), (6, 13)]),
    "add_blocks": lambda subject: subject.pool.add_blocks(3),
    "remove_last_blocks": lambda subject: subject.pool.remove_last_blocks(4),
    "hold": open_hold,
    "release": lambda subject: subject.hold.release(),
    "take_events": lambda subject: subject.pool.take_events(),
}
KINDS = {
    "plain": {},
    "bands": {},
    "runs": {},
    "policy": {"policy": "s3fifo", "live_curve": True},
}
CASES = [
    Case(
        f"{kind} {name}",
        lambda kind=kind, options=options: Pooling(kind, **options),
        call,
    )
    for kind, options in KINDS.items()
    for name, call in CALLS.items()
]
