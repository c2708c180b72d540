"""`SlotEngine`: an engine's bytes by block id and its block tables of ids."""

from drawing import make_pool

from kv_pool.contiguous.run_pool import RunBlockPool


class CopyFailedError(Exception):
    """Raised when a copy failed, wholly or in part."""


class SlotEngine:
    """Slots contain strings. `copy` copies at once, and fails after `fail_after` moves.

    The moves of a call are copied in an arbitrary order, on which no plan may rely.
    """

    def __init__(self, pool):
        self.pool = pool
        self.slots = {block.block_id: f"nothing in {block.block_id}" for block in pool.blocks}
        self.fail_after = None
        self.copies = []

    def write(self, blocks, name):
        for position, block in enumerate(blocks):
            self.slots[block.block_id] = f"{name}/{position}"

    def read(self, blocks):
        return [self.slots[block.block_id] for block in blocks]

    def copy(self, moves):
        assert {source for source, _ in moves}.isdisjoint(target for _, target in moves)
        for number, (source, target) in enumerate(moves):
            if number == self.fail_after:
                raise CopyFailedError(f"after {number} moves")
            self.slots[target] = self.slots[source]
        if self.fail_after is not None and self.fail_after >= len(moves):
            raise CopyFailedError("after the last move")
        self.copies.append(list(moves))


def make_run_pool(picture, **options):
    """Like `make_pool`, but make a pool with a run index."""
    pool = make_pool(picture, RunBlockPool, **options)
    pool.rebuild_index()
    return pool
