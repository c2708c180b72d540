"""`TokenEngine`: an engine whose KV is one number, derived from all tokens so far, in an array by slot."""

import numpy as np

from kv_pool import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

MASK = 2**62 - 1


def mix(digest, token):
    """Return the KV of a token after tokens with this digest; it depends on all of them and their order."""
    return (digest * 6364136223846793005 + token * 1442695040888963407 + 12345) & MASK


def find_first_read(spec, position):
    """Return the first position that the token at `position` attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, position - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return position // spec.attention_chunk_size * spec.attention_chunk_size
    return 0


class TokenEngine:
    """Writes and checks slots of blocks; knows tables as lists of ids only."""

    def __init__(self, num_blocks, groups):
        self.groups = groups
        self.slots = np.full((num_blocks, max(spec.block_size for spec in groups)), -1, dtype=np.int64)

    def copy(self, moves):
        sources = {move.source for move in moves}
        targets = [move.target for move in moves]
        assert len(set(targets)) == len(targets), f"a block is copied to twice: {moves}"
        assert not sources & set(targets), f"a block is copied from and to: {moves}"
        for source_id, target_id in moves:
            self.slots[target_id] = self.slots[source_id]

    def write(self, group_id, table, first, digests):
        """Write the KV of the positions from `first` on, one per digest; skips null blocks."""
        spec = self.groups[group_id]
        if isinstance(spec, MambaSpec):
            last = first + len(digests) - 1
            block_id = table[last // spec.block_size]
            assert block_id != 0, f"group {group_id}: there is no block for the state after token {last}"
            self.slots[block_id, 0] = digests[-1] ^ group_id
            return
        positions = np.arange(first, first + len(digests))
        block_ids = np.asarray(table)[positions // spec.block_size]
        kept = block_ids != 0
        values = np.asarray(digests, dtype=np.int64) ^ group_id
        self.slots[block_ids[kept], (positions % spec.block_size)[kept]] = values[kept]

    def check_state(self, group_id, table, num_computed, digests):
        """Check that the state after the computed tokens is in the block that a step reads."""
        if num_computed:
            block_id = table[(num_computed - 1) // self.groups[group_id].block_size]
            assert self.slots[block_id, 0] == digests[num_computed - 1] ^ group_id, (
                f"group {group_id}: block {block_id} has not the state after {num_computed} tokens"
            )

    def check_reads(self, group_id, table, position, num_tokens, digests):
        """Check all KV that the token at `position` attends to, among the first `num_tokens` tokens."""
        spec = self.groups[group_id]
        first = find_first_read(spec, position)
        if first >= num_tokens:
            return
        positions = np.arange(first, num_tokens)
        block_ids = np.asarray(table)[positions // spec.block_size]
        found = self.slots[block_ids, positions % spec.block_size]
        expected = np.asarray(digests[first:num_tokens], dtype=np.int64) ^ group_id
        wrong = np.flatnonzero(found != expected)
        assert not len(wrong), (
            f"group {group_id}: block {block_ids[wrong[0]]} has not the KV of token {positions[wrong[0]]}"
        )
