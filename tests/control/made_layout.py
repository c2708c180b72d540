"""Small layouts, from pools or drawn by hand."""

from adapter.made_pool import make, take

from kv_pool.reports import BlockState, PoolLayout

STATES = {
    "0": BlockState.NULL,
    ".": BlockState.EMPTY,
    "*": BlockState.CACHED,
    "#": BlockState.IN_USE,
    "P": BlockState.IMMOVABLE,
}


def write_layout(drawn, run_length=4, device_id=0):
    """Return the layout drawn as `0 ##-#P *.`, one character per block; `-` joins its neighbours."""
    states, joins, join = bytearray(), bytearray(), 0
    for character in drawn.replace(" ", ""):
        if character == "-":
            join = 1
        else:
            states.append(STATES[character])
            joins.append(join)
            join = 0
    holders = bytes(state >= BlockState.IN_USE for state in states)
    return PoolLayout(16, run_length, 0, device_id, bytes(states), bytes(joins), holders)


def make_sixteen():
    """Return a pool with every kind of cell: 1-6, 12, 14 in use; 5 pinned; 7, 8, 13 cached; rest empty."""
    pool = make(16, run_length=3)
    for sequence_id, num_blocks in enumerate([3, 1, 2, 2, 3, 1, 1, 1, 2], start=1):
        take(pool, sequence_id, num_blocks)
    pool.pin([5])
    pool.cache_prefix(4, [b"a", b"b"])
    pool.cache_prefix(7, [b"c"])
    pool.fork(1, 20, 2)
    for sequence_id in (4, 5, 7, 9):
        pool.free_sequence(sequence_id)
    return pool
