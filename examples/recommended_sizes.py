"""Sizes to begin with: of a sequence's blocks by its access pattern, of a pool by model and workload.

Run it: python examples/recommended_sizes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kv_pool import InvalidArgumentError, SequenceId
from kv_pool.core.arguments import as_int, as_ints
from kv_pool.integrations.sequence_allocator import KVCacheAllocator
from kv_pool.lab.capacity import MODELS

_NEAR_TOKENS = 16
_USABLE_SHARE = 0.9
"""Share of the device's memory for weights and blocks; the rest is for activations and the runtime."""

# The model, its parameters, GiB of the device, bits of a weight: 16 bits of 13B do not fit into 24 GiB.
_MODEL_SIZES = {"7B": ("llama-2-7b", 7e9, 16, 16), "13B": ("llama-2-13b", 13e9, 24, 8)}
_BLOCK_SIZES = {"chat": 16, "code": 8, "long-doc": 32}


class AdaptiveBlockManager:
    """Records the locality of sequences' reads, and recommends a block size for each sequence.

    Large blocks need fewer block table entries and are copied in fewer pieces; small blocks leave fewer
    unused slots after the last token, and share more of a prefix. A pool has one block size, so each block
    size needs a pool, or a `KVCacheAllocator`, of its own.

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
        self._block_sizes: dict[SequenceId, int] = {}

    def profile_sequence(self, sequence_id: SequenceId, access_pattern: Sequence[int]) -> None:
        """Record the order in which tokens of a sequence are read; replaces its profile. O(positions).

        Args:
            access_pattern: positions in the sequence. Fewer than two change nothing.
        """
        sequence_id = SequenceId(as_int("sequence_id", sequence_id))
        positions = as_ints("access_pattern", access_pattern)
        if len(positions) < 2:
            return
        near = sum(abs(after - before) <= _NEAR_TOKENS for before, after in pairwise(positions))
        locality = near / (len(positions) - 1)
        size = self.max_block_size if locality > 0.8 else 32 if locality > 0.5 else self.min_block_size
        self._block_sizes[sequence_id] = size

    def get_optimal_block_size(self, sequence_id: SequenceId) -> int:
        """Return a block size for the sequence, in tokens, within the manager's bounds.

        The largest if more than 80 % of its reads are within 16 tokens of the previous one, 32 if more than
        50 % are, else the smallest; 16 without a profile.
        """
        size = self._block_sizes.get(SequenceId(as_int("sequence_id", sequence_id)), 16)
        return min(max(size, self.min_block_size), self.max_block_size)

    def forget_sequence(self, sequence_id: SequenceId) -> None:
        """Drop the profile of a sequence that has ended; no-op if there is none."""
        self._block_sizes.pop(SequenceId(as_int("sequence_id", sequence_id)), None)


class SystemConfigOptimizer:
    """Recommends the sizes of a pool."""

    @staticmethod
    def recommend_config(model_size: str, workload_type: str) -> dict[str, int]:
        """Return sizes for `GPUKVPool(total_blocks, block_size)` with 16-bit KV on one device.

        For other models and devices, call `KVCacheAllocator.count_blocks` with their memory and KV shape.

        Args:
            model_size: "7B" or "13B", with the KV shape of Llama 2: every attention head has K and V.
            workload_type: "chat", "code" or "long-doc"; determines the block size.
        Returns:
            block_size: tokens per block. gpu_memory: memory of the device on which the model usually runs, in
            GiB. weight_bits: bits per parameter of the weights there. total_blocks: blocks that fit into 90 %
            of the memory together with the weights.
        Raises:
            InvalidArgumentError: a name is unknown.
        """
        if model_size not in _MODEL_SIZES or workload_type not in _BLOCK_SIZES:
            raise InvalidArgumentError(
                f"unknown model_size {model_size!r} or workload_type {workload_type!r}; model_size is one of "
                f"{', '.join(_MODEL_SIZES)}, workload_type one of {', '.join(_BLOCK_SIZES)}. For other "
                f"models use KVCacheAllocator.count_blocks"
            )
        name, num_parameters, gpu_memory, weight_bits = _MODEL_SIZES[model_size]
        kv, block_size = MODELS[name], _BLOCK_SIZES[workload_type]
        left = gpu_memory * 2**30 * _USABLE_SHARE - num_parameters * weight_bits / 8
        total_blocks = KVCacheAllocator.count_blocks(
            left, block_size, kv.num_layers, kv.num_kv_heads, kv.head_size
        )
        return {
            "block_size": block_size,
            "total_blocks": total_blocks,
            "gpu_memory": gpu_memory,
            "weight_bits": weight_bits,
        }


def main() -> None:
    manager = AdaptiveBlockManager(min_block_size=8, max_block_size=64)
    manager.profile_sequence(SequenceId(1), [0, 1, 2, 3, 4])
    manager.profile_sequence(SequenceId(2), [0, 900, 40, 2000])
    for number, reads in ((1, "near the previous read"), (2, "far from it"), (3, "unknown")):
        print(f"reads {reads}: blocks of {manager.get_optimal_block_size(SequenceId(number))} tokens")
    for workload_type in _BLOCK_SIZES:
        print(f"7B, {workload_type}: {SystemConfigOptimizer.recommend_config('7B', workload_type)}")


if __name__ == "__main__":
    main()

# prints:
# reads near the previous read: blocks of 64 tokens
# reads far from it: blocks of 8 tokens
# reads unknown: blocks of 16 tokens
# 7B, chat: {'block_size': 16, 'total_blocks': 174, 'gpu_memory': 16, 'weight_bits': 16}
# 7B, code: {'block_size': 8, 'total_blocks': 348, 'gpu_memory': 16, 'weight_bits': 16}
# 7B, long-doc: {'block_size': 32, 'total_blocks': 87, 'gpu_memory': 16, 'weight_bits': 16}
