"""Prompts that are computed once and shared by the sequences that start with them, such as samples.

Two prompts share a prefix here only if all their tokens are equal. `KVCacheManager` finds common prefixes of
arbitrary prompts.

Run it: python examples/shared_prefixes.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from kv_pool import BlockId, InvalidArgumentError, SequenceId
from kv_pool.core.arguments import as_ints
from kv_pool.integrations.sequence_allocator import KVCacheAllocator, SequencePageTable


class SharedPrefixManager:
    """Keeps the blocks of prompts that several sequences start with, such as the samples of one prompt.

    Args:
        compute: called once for each prefix with its sequence id and tokens; must write their K and V with
            `KVCacheAllocator.write`. None: the caller writes them to the sequence
            `prefix_sequences[prefix]` before the first fork.

    Attributes:
        prefix_sequences: the id of the allocator's sequence that holds each prefix, by prefix; negative.
    """

    def __init__(
        self, allocator: KVCacheAllocator, compute: Callable[[SequenceId, list[int]], object] | None = None
    ) -> None:
        self.allocator = allocator
        self.prefix_sequences: dict[str, SequenceId] = {}
        self._compute = compute

    @property
    def prefix_blocks(self) -> dict[str, list[BlockId]]:
        """The block ids of each prefix, by prefix."""
        return {
            prefix: self.allocator.find(sequence_id).get_all_blocks()
            for prefix, sequence_id in self.prefix_sequences.items()
        }

    def create_shared_prefix(self, prompt_tokens: Sequence[int]) -> str:
        """Compute a prompt unless it exists, and return its name: 64 hex digits.

        Raises:
            InvalidArgumentError: the prompt is empty.
            PoolExhaustedError: too few blocks are free; also a `MemoryError`.
            Any exception of `compute`. In all cases nothing has changed.
        """
        tokens = as_ints("prompt_tokens", prompt_tokens)
        if not tokens:
            raise InvalidArgumentError("prompt_tokens is empty; a prefix has at least 1 token")
        prefix = hashlib.sha256(msgspec.msgpack.encode(tokens)).hexdigest()
        if prefix not in self.prefix_sequences:
            sequence_id = SequenceId(min(-1, min(self.allocator.sequence_tables, default=0) - 1))
            self.allocator.allocate_sequence(sequence_id, len(tokens))
            with ExitStack() as on_failure:
                on_failure.callback(self.allocator.free_sequence, sequence_id)
                if self._compute is not None:
                    self._compute(sequence_id, tokens)
                on_failure.pop_all()
            self.prefix_sequences[prefix] = sequence_id
        return prefix

    def fork_sequence(self, prefix_hash: str, sequence_id: SequenceId) -> SequencePageTable:
        """Create a sequence that shares the tokens and blocks of a prefix.

        Raises:
            InvalidArgumentError: there is no such prefix, or the sequence exists; also a `ValueError`.
        """
        return self.allocator.fork_sequence(self._find(prefix_hash), sequence_id)

    def free_shared_prefix(self, prefix_hash: str) -> None:
        """Drop a prefix; sequences that share its blocks keep them until they end.

        Raises:
            InvalidArgumentError: there is no such prefix.
        """
        self.allocator.free_sequence(self._find(prefix_hash))
        del self.prefix_sequences[prefix_hash]

    def _find(self, prefix_hash: str) -> SequenceId:
        if prefix_hash not in self.prefix_sequences:
            raise InvalidArgumentError(
                f"there is no prefix {prefix_hash!r}; pass a name that create_shared_prefix() returned"
            )
        return self.prefix_sequences[prefix_hash]


def main() -> None:
    allocator = KVCacheAllocator(total_blocks=8, block_size=4, num_heads=2, head_dim=16)
    prefixes = SharedPrefixManager(allocator)
    prefix = prefixes.create_shared_prefix([1, 2, 3, 4, 5])
    print("prefix:", prefixes.prefix_blocks[prefix])
    for sequence_id in map(SequenceId, (7, 8)):
        print(prefixes.fork_sequence(prefix, sequence_id))
    allocator.extend_sequence(SequenceId(7), 1)
    print(allocator.sequence_tables[SequenceId(7)], "after a token: its last block is a copy")


if __name__ == "__main__":
    main()

# prints:
# prefix: [0, 1]
# <SequencePageTable 7: 5 tokens in blocks [0, 1]>
# <SequencePageTable 8: 5 tokens in blocks [0, 1]>
# <SequencePageTable 7: 6 tokens in blocks [0, 2]> after a token: its last block is a copy
