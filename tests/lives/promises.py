"""`Promise`: bytes that must stay at their block ids. `Writer`: a transfer that writes into leased blocks."""

import numpy as np

from kv_pool.manager.leases import LeaseState


class Promise:
    """Blocks that keep their ids and their bytes, for the reason given, until the promise ends.

    Args:
        slots: how many slots of each block have content; all of them by default.
    """

    def __init__(self, side, blocks, reason, slots=None):
        self.side = side
        self.reason = reason
        self.entries = {}
        for position, block in enumerate(blocks):
            if not block.is_null:
                num_slots = side.kv.shape[1] if slots is None else slots[position]
                self.entries[block] = block.block_id, side.kv[block.block_id, :num_slots].copy()

    def forget(self, block):
        self.entries.pop(block, None)

    def check(self):
        for block, (block_id, row) in self.entries.items():
            check_place(self.side, block, block_id, self.reason)
            if not np.array_equal(self.side.kv[block_id, : len(row)], row):
                raise AssertionError(f"block {block_id} was overwritten; it is {self.reason}")


class Writer:
    """A transfer that writes into leased blocks by id, even after its request was aborted.

    Attributes:
        owed: writes still to make, (block id, slot, value) each; None for a pull, which writes itself.
    """

    def __init__(self, node, lease):
        self.node = node
        self.side = node.device
        self.lease = lease
        self.ids = {block: block.block_id for block in lease.blocks}
        self.rows = {block_id: self.side.kv[block_id].copy() for block_id in self.ids.values()}
        self.owed = None
        node.writers.append(self)

    @property
    def is_late(self):
        return self.lease.state is LeaseState.QUARANTINED

    def write(self, block_id, slot, value):
        self.rows[block_id][slot] = value
        self.side.kv[block_id, slot] = value

    def write_row(self, block_id, row):
        self.rows[block_id][:] = row
        self.side.kv[block_id] = row

    def write_owed(self, count):
        """Make some of the remaining writes: (block id, slot, value) each."""
        for block_id, slot, value in self.owed[:count]:
            self.write(block_id, slot, value)
        del self.owed[:count]

    def check(self):
        for block, block_id in self.ids.items():
            check_place(self.side, block, block_id, "being written")
            if not np.array_equal(self.side.kv[block_id], self.rows[block_id]):
                raise AssertionError(f"block {block_id} was overwritten; {self.lease!r} writes it")

    def end(self):
        """End the transfer and its lease."""
        self.lease.release()
        self.node.writers.remove(self)


def check_place(side, block, block_id, reason):
    pool = side.pool
    is_there = block_id < len(pool.blocks) and pool.blocks[block_id] is block
    if not is_there or block.block_id != block_id:
        raise AssertionError(f"block {block_id} has moved to {block.block_id}; it is {reason}")
