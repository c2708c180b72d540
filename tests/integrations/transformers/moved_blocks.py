"""Moving blocks at random: bytes by the storage, identities by the pool."""

from kv_pool import BlockMove


def move_blocks(rng, sequences):
    """Move random blocks that hold something to random ones that hold nothing. Returns how many."""
    pool = sequences.manager.block_pool
    holding = [block.block_id for block in pool.blocks[1:] if block.ref_cnt or block.block_hash]
    empty = [block.block_id for block in pool.blocks[1:] if not block.ref_cnt and not block.block_hash]
    num_moves = min(len(holding), len(empty), rng.randint(1, 6))
    moves = [
        BlockMove(*pair)
        for pair in zip(rng.sample(holding, num_moves), rng.sample(empty, num_moves), strict=True)
    ]
    sequences.storage.apply_moves(moves)
    if hasattr(pool, "swap_block_ids"):
        pool.swap_block_ids(moves)
    else:
        swap_by_hand(pool, moves)
    for source, _ in moves:  # nobody may read the old places any more: they are not numbers now
        sequences.storage.write_block(source, b"\xff" * sequences.storage.block_bytes)
    return num_moves


def swap_by_hand(pool, moves):
    """What a pool without `swap_block_ids` needs: forget the blocks' keys, exchange the ids, cache again."""
    blocks = list(pool.blocks)
    for source, target in moves:
        moved, other = blocks[source], blocks[target]
        key, num_tokens = moved.block_hash, moved.block_hash_num_tokens
        pool.evict_blocks([source])
        moved.block_id, other.block_id = target, source
        blocks[source], blocks[target] = other, moved
        pool.blocks = tuple(blocks)
        if key is not None:
            moved.set_block_hash(key, num_tokens)
            pool.cached_block_hash_to_block.insert(key, moved)
