"""Follow ten blocks through requests that share a prompt.

Run it: python examples/follow_a_prefix.py
"""

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request, RequestId

pool = BlockPool(num_gpu_blocks=11, enable_caching=True, hash_block_size=4)  # block 0 is the null block
manager = KVCacheManager(pool)
hasher = BlockHasher(block_size=4)


def draw(what: str) -> None:
    """Print the blocks. Free blocks: the next to be reused first; * = cached; xN = used by N requests."""
    cells = [
        f"{block.block_id}{'*' if block.block_hash else ''}"
        for block in pool.free_block_queue.get_all_free_blocks()
    ]
    held = [
        f"{block.block_id}{'*' if block.block_hash else ''}"
        + (f"x{block.ref_cnt}" if block.ref_cnt > 1 else "")
        for block in pool.blocks[1:]
        if block.ref_cnt
    ]
    print(f"{what:<37} free: {' '.join(cells):<24} in use: {' '.join(held)}".rstrip())


system_prompt = list(range(100, 108))  # two full blocks
draw("a new pool")

alice = Request(RequestId("alice"), [*system_prompt, 1, 2, 3, 4, 5], hasher)
manager.allocate_slots(alice, alice.num_tokens)
alice.num_computed_tokens = alice.num_tokens
draw("alice: 13 tokens take 4 blocks")

bob = Request(RequestId("bob"), [*system_prompt, 7, 8], hasher)
prefix = manager.get_computed_blocks(bob)
manager.allocate_slots(bob, bob.num_tokens - prefix.num_tokens, prefix)
draw(f"bob: hits {prefix.num_tokens} tokens, takes 1 block")

manager.free(alice)
draw("alice ends, her tail goes first")
manager.free(bob)
draw("bob ends, the prompt is kept last")

carol = Request(RequestId("carol"), range(500, 532), hasher)
manager.allocate_slots(carol, carol.num_tokens)
draw("carol: 32 tokens evict nothing shared")

# prints:
# a new pool                            free: 1 2 3 4 5 6 7 8 9 10     in use:
# alice: 13 tokens take 4 blocks        free: 5 6 7 8 9 10             in use: 1* 2* 3* 4
# bob: hits 8 tokens, takes 1 block     free: 6 7 8 9 10               in use: 1*x2 2*x2 3* 4 5
# alice ends, her tail goes first       free: 4 6 7 8 9 10 3*          in use: 1* 2* 5
# bob ends, the prompt is kept last     free: 5 4 6 7 8 9 10 3* 2* 1*  in use:
# carol: 32 tokens evict nothing shared free: 2* 1*                    in use: 3* 4* 5* 6* 7* 8* 9* 10*
