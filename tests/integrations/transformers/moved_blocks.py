"""Random moves of blocks: bytes in the storage, ids in the pool."""

from kv_pool import BlockMove


def move_blocks(rng, sequences):
    """Move random blocks with contents to random empty ones; return their number."""
    pool = sequences.manager.block_pool
    pool.flush_evicted()
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
    """Fill empty blocks with NaN bytes, which no code may read."""
    sequences.manager.block_pool.flush_evicted()
    for block in sequences.manager.block_pool.blocks[1:]:
        if not block.ref_cnt and not block.block_hash:
            sequences.storage.write_block(block.block_id, b"\xff" * sequences.storage.block_bytes)


def crowd_out(sequences):
    """Take and free all free blocks of the device, so that their old contents are only in the tiers."""
    pool = sequences.manager.block_pool
    sequences.begin_step()  # by another owner, so that earlier writes are known to be complete
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    sequences.begin_step()
    pool.free_blocks(taken)
    spoil_empty(sequences)
