"""An engine's memory manager over the pool: allocate blocks, evict other sequences, free a sequence.

Run it: python examples/memory_manager.py
"""

from kv_pool import BlockAllocationRequest, BlockId, GPUKVPool, PoolExhaustedError, SequenceId

BLOCK_SIZE = 16


class MemoryManager:
    """The calls of an engine: before a prefill, when a sequence grows, and when it ends."""

    def __init__(self, total_blocks: int) -> None:
        self.pool = GPUKVPool(total_blocks, BLOCK_SIZE, placement="first_fit", on_evicted=self.note_evicted)
        self.to_recompute: list[SequenceId] = []

    def note_evicted(self, sequence_id: SequenceId, block_ids: list[BlockId]) -> None:
        print(f"sequence {sequence_id} loses blocks {block_ids}")
        self.to_recompute.append(sequence_id)

    def allocate_for_sequence(self, sequence_id: SequenceId, num_tokens: int) -> list[BlockId]:
        """Return blocks for `num_tokens` tokens. Sequences 0 to 9 have priority over the others.

        If too few blocks are free, the pool evicts the least recently used sequence that is not pinned.
        """
        request = BlockAllocationRequest(
            num_blocks=-(-num_tokens // BLOCK_SIZE),
            sequence_id=sequence_id,
            priority=1 if sequence_id < 10 else 0,
        )
        return self.pool.allocate(request)

    def free_sequence(self, sequence_id: SequenceId) -> None:
        self.pool.free_sequence(sequence_id)


manager = MemoryManager(total_blocks=10)
important, first, second, third = map(SequenceId, (1, 20, 21, 22))
print("sequence 1: ", manager.allocate_for_sequence(important, num_tokens=50))
print("sequence 20:", manager.allocate_for_sequence(first, num_tokens=40))
print("sequence 20:", manager.allocate_for_sequence(first, num_tokens=16), "grows into the next id")
manager.pool.pin(manager.pool.blocks_of(important)[:1])  # a system prompt stays

print("sequence 21:", manager.allocate_for_sequence(second, num_tokens=64))
print("to be recomputed:", manager.to_recompute)
manager.free_sequence(second)
print("free blocks:", manager.pool.get_free_blocks())

try:
    manager.allocate_for_sequence(third, num_tokens=300)
except PoolExhaustedError as error:
    print("refused:", str(error).partition(" Tried")[0])

# prints:
# sequence 1:  [1, 2, 3, 4]
# sequence 20: [5, 6, 7]
# sequence 20: [8] grows into the next id
# sequence 20 loses blocks [5, 6, 7, 8]
# sequence 21: [5, 6, 7, 8]
# to be recomputed: [20]
# free blocks: 6
# refused: asked for 19 blocks for sequence 22, 6 are free of 10.
