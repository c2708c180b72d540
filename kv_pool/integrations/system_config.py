"""`SystemConfigOptimizer`: recommends block size and number of blocks for a model size and a workload."""

from __future__ import annotations

from typing import NamedTuple

from kv_pool.core.arguments import as_int
from kv_pool.errors import InvalidArgumentError
from kv_pool.integrations.sequence_allocator import KVCacheAllocator
from kv_pool.replay.capacity import MODELS, ModelKV

_USABLE_SHARE = 0.9
"""Share of the device's memory for weights and blocks; the rest is for activations and the runtime."""


class _ModelSize(NamedTuple):
    """A model size: its KV shape and the device on which it usually runs."""

    kv: ModelKV
    num_parameters: float
    gpu_memory: int
    weight_bits: int


# The weights of 13 billion parameters do not fit into 24 GiB at 16 bits each.
_MODEL_SIZES = {
    "7B": _ModelSize(MODELS["llama-2-7b"], 7e9, 16, 16),
    "13B": _ModelSize(MODELS["llama-2-13b"], 13e9, 24, 8),
}
_BLOCK_SIZES = {"chat": 16, "code": 8, "long-doc": 32}


class SystemConfigOptimizer:
    """Recommends the sizes of a pool.

    >>> from kv_pool.integrations.system_config import SystemConfigOptimizer
    >>> SystemConfigOptimizer.recommend_config("7B", "chat")
    {'block_size': 16, 'total_blocks': 174, 'gpu_memory': 16, 'weight_bits': 16}
    >>> SystemConfigOptimizer.recommend_config("7B", "chat", gpu_memory=24)["total_blocks"]
    1095
    """

    @staticmethod
    def recommend_config(
        model_size: str, workload_type: str, *, gpu_memory: int | None = None, weight_bits: int | None = None
    ) -> dict[str, int]:
        """Return sizes for `GPUKVPool(total_blocks, block_size)` with 16-bit KV on one device.

        For other models, call `KVCacheAllocator.count_blocks` with their layers, heads and head size.

        Args:
            model_size: "7B" or "13B", with the KV shape of Llama 2: every attention head has K and V.
            workload_type: "chat", "code" or "long-doc"; determines the block size.
            gpu_memory: memory of the device in GiB; None: 16 for 7B, 24 for 13B.
            weight_bits: bits per parameter of the weights; None: 16 for 7B, 8 for 13B.
        Returns:
            block_size: tokens per block. total_blocks: blocks that fit into 90 % of the memory together with
            the weights. gpu_memory, weight_bits: the values used, in GiB and bits.
        Raises:
            InvalidArgumentError: a name is unknown, a number is below 1, or no block fits beside the weights.
        """
        if model_size not in _MODEL_SIZES or workload_type not in _BLOCK_SIZES:
            raise InvalidArgumentError(
                f"unknown model_size {model_size!r} or workload_type {workload_type!r}; model_size is one of "
                f"{', '.join(_MODEL_SIZES)}, workload_type one of {', '.join(_BLOCK_SIZES)}. For other "
                f"models use KVCacheAllocator.count_blocks"
            )
        model = _MODEL_SIZES[model_size]
        memory = model.gpu_memory if gpu_memory is None else as_int("gpu_memory", gpu_memory)
        bits = model.weight_bits if weight_bits is None else as_int("weight_bits", weight_bits)
        if memory < 1 or bits < 1:
            raise InvalidArgumentError(
                f"gpu_memory is {memory} GiB and weight_bits {bits}; both are at least 1"
            )
        block_size = _BLOCK_SIZES[workload_type]
        left = memory * 2**30 * _USABLE_SHARE - model.num_parameters * bits / 8
        if left < model.kv.count_block_bytes(block_size):
            raise InvalidArgumentError(
                f"{model_size} with weights of {bits} bits takes {model.num_parameters * bits / 8e9:.1f} GB "
                f"of the {memory * 2**30 * _USABLE_SHARE / 1e9:.1f} GB that {memory} GiB leave for weights "
                f"and blocks; no block fits. Pass fewer weight_bits, or more gpu_memory"
            )
        kv = model.kv
        total_blocks = KVCacheAllocator.count_blocks(
            left, block_size, kv.num_layers, kv.num_kv_heads, kv.head_size
        )
        return {
            "block_size": block_size,
            "total_blocks": total_blocks,
            "gpu_memory": memory,
            "weight_bits": bits,
        }
