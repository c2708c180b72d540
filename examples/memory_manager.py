"""An engine's memory manager on the pool: blocks for a sequence, if need be those of others; free a sequence.

Run it: python examples/memory_manager.py
"""

from kv_pool import BlockAllocationRequest, GPUKVPool, PoolExhaustedError

BLOCK_SIZE = 16


class MemoryManager:
    """What an engine calls before a prefill, as a sequence grows, and when it ends."""

    def __init__(self, total_blocks: int) -> None:
        self.pool = GPUKVPool(total_blocks, BLOCK_SIZE, placement="first_fit", on_evicted=self.note_evicted)
        self.to_compute_again: list[int] = []

    def note_evicted(self, sequence_id: int, block_ids: list[int]) -> None:
        print(f"sequence {sequence_id} loses blocks {block_ids}")
        self.to_compute_again.append(sequence_id)

    def allocate_for_sequence(self, sequence_id: int, num_tokens: int) -> list[int]:
        """Return blocks for `num_tokens` tokens. Other sequences do not evict the first ten.

        Where too few blocks are free, the pool evicts what was used longest ago and is not pinned.
        """
        request = BlockAllocationRequest(
            num_blocks=-(-num_tokens // BLOCK_SIZE),
            sequence_id=sequence_id,
            priority=1 if sequence_id < 10 else 0,
        )
        return self.pool.allocate(request)

    def free_sequence(self, sequence_id: int) -> None:
        self.pool.free_sequence(sequence_id)


manager = MemoryManager(total_blocks=10)
print("sequence 1: ", manager.allocate_for_sequence(1, num_tokens=50))
print("sequence 20:", manager.allocate_for_sequence(20, num_tokens=40))
print("sequence 20:", manager.allocate_for_sequence(20, num_tokens=16), "grows into the next id")
manager.pool.pin(manager.pool.blocks_of(1)[:1])  # a system prompt stays

print("sequence 21:", manager.allocate_for_sequence(21, num_tokens=64))
print("computed again later:", manager.to_compute_again)
manager.free_sequence(21)
print("free blocks:", manager.pool.get_free_blocks())

try:
    manager.allocate_for_sequence(22, num_tokens=300)
except PoolExhaustedError as error:
    print("refused:", str(error).partition(" Tried")[0])

# prints:
# sequence 1:  [1, 2, 3, 4]
# sequence 20: [5, 6, 7]
# sequence 20: [8] grows into the next id
# sequence 20 loses blocks [5, 6, 7, 8]
# sequence 21: [5, 6, 7, 8]
# computed again later: [20]
# free blocks: 6
# refused: asked for 19 blocks for sequence 22, 6 are free of 10.
