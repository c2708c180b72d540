"""`AdaptiveBlockManager`: recommends a block size for each sequence by its access pattern."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kv_pool.core.arguments import as_int, as_ints
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import SequenceId

_NEAR_TOKENS = 16
_USUAL_BLOCK_SIZE = 16
_MEDIUM_BLOCK_SIZE = 32
_HIGH_LOCALITY = 0.8
_MEDIUM_LOCALITY = 0.5


class AdaptiveBlockManager:
    """Records the locality of sequences' reads, and recommends a block size for each sequence.

        >>> from kv_pool.integrations.adaptive_block_size import AdaptiveBlockManager
        >>> manager = AdaptiveBlockManager(min_block_size=8, max_block_size=64)
        >>> manager.profile_sequence(1, [0, 1, 2, 3, 4])
        >>> manager.profile_sequence(2, [0, 900, 40, 2000])
        >>> [manager.get_optimal_block_size(sequence_id) for sequence_id in (1, 2, 3)]
        [64, 8, 16]

    Large blocks need fewer block table entries and are copied in fewer pieces; small blocks leave fewer
    unused slots after the last token, and share more of a prefix. A pool has one block size, so each block
    size needs a pool, or a `KVCacheAllocator`, of its own. Attention that reads all tokens in order has a
    locality of 1.0 for every sequence.

    Args:
        min_block_size, max_block_size: bounds of the recommended size, in tokens per block.
    Raises:
        InvalidArgumentError: not 1 <= min_block_size <= max_block_size.
    """

    def __init__(self, min_block_size: int = 8, max_block_size: int = 64) -> None:
        self.min_block_size = as_int("min_block_size", min_block_size)
        self.max_block_size = as_int("max_block_size", max_block_size)
        if not 1 <= self.min_block_size <= self.max_block_size:
            raise InvalidArgumentError(
                f"min_block_size is {min_block_size} and max_block_size {max_block_size}; a block has at "
                f"least 1 token, and max_block_size is at least min_block_size"
            )
        self._locality: dict[SequenceId, float] = {}

    def profile_sequence(self, sequence_id: SequenceId, access_pattern: Sequence[int]) -> None:
        """Record the order in which tokens of a sequence are read; replaces its profile. O(positions).

        Args:
            access_pattern: positions in the sequence. Fewer than two change nothing.
        """
        sequence_id = SequenceId(as_int("sequence_id", sequence_id))
        positions = as_ints("access_pattern", access_pattern)
        if len(positions) > 1:
            near = sum(abs(after - before) <= _NEAR_TOKENS for before, after in pairwise(positions))
            self._locality[sequence_id] = near / (len(positions) - 1)

    def get_locality(self, sequence_id: SequenceId) -> float | None:
        """Return the share of reads within 16 tokens of the previous read, 0 to 1; None without a profile."""
        return self._locality.get(SequenceId(as_int("sequence_id", sequence_id)))

    def get_optimal_block_size(self, sequence_id: SequenceId) -> int:
        """Return a block size for the sequence, in tokens, within the manager's bounds.

        The largest for a locality above 0.8, 32 above 0.5, else the smallest; 16 without a profile.
        """
        locality = self.get_locality(sequence_id)
        if locality is None:
            size = _USUAL_BLOCK_SIZE
        elif locality > _HIGH_LOCALITY:
            size = self.max_block_size
        elif locality > _MEDIUM_LOCALITY:
            size = _MEDIUM_BLOCK_SIZE
        else:
            size = self.min_block_size
        return min(max(size, self.min_block_size), self.max_block_size)

    def forget_sequence(self, sequence_id: SequenceId) -> None:
        """Drop the profile of a sequence that has ended; no-op if there is none."""
        self._locality.pop(SequenceId(as_int("sequence_id", sequence_id)), None)
