"""Moving blocks at random: bytes by the storage, identities by the pool."""

from kv_pool import BlockMove


def move_blocks(rng, sequences):
    """Move random blocks that hold something to random ones that hold nothing. Returns how many."""
    pool = sequences.manager.block_pool
    pool.store_pending()
    holding = [block.block_id for block in pool.blocks[1:] if block.ref_cnt or block.block_hash]
    empty = [block.block_id for block in pool.blocks[1:] if not block.ref_cnt and not block.block_hash]
    num_moves = min(len(holding), len(empty), rng.randint(1, 6))
    moves = [
        BlockMove(*pair)
        for pair in zip(rng.sample(holding, num_moves), rng.sample(empty, num_moves), strict=True)
    ]
    sequences.storage.apply_moves(moves)
    pool.swap_block_ids(moves)
    spoil_empty(sequences)
    return num_moves


def spoil_empty(sequences):
    """Nobody may read what holds nothing: in no type are these bytes a number."""
    sequences.manager.block_pool.store_pending()
    for block in sequences.manager.block_pool.blocks[1:]:
        if not block.ref_cnt and not block.block_hash:
            sequences.storage.write_block(block.block_id, b"\xff" * sequences.storage.block_bytes)


def crowd_out(sequences):
    """Take all free blocks of the device, so that what they held is in the tiers alone; give them back."""
    pool = sequences.manager.block_pool
    sequences.begin_step()  # of somebody else, so that what the last one wrote is known to be written
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    sequences.begin_step()
    pool.free_blocks(taken)
    spoil_empty(sequences)
