"""A small transformer with keys and values in blocks: attention, layer and engine over a `KVCacheAllocator`.

For study, one sequence at a time; to run a transformers model on blocks, use `PagedCache`.

Run it: pip install '.[torch]' && python examples/paged_transformer.py
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

try:
    import torch
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:
    sys.exit(f"this example needs torch ({error}): pip install '.[torch]'")

from kv_pool import InvalidArgumentError, SequenceId, UnknownSequenceError
from kv_pool.integrations.sequence_allocator import KVCacheAllocator

_BLOCK_SIZE = 16
_KV_SHARE = 0.7


class PagedAttention:
    """Attention of a sequence's last tokens over all of its tokens, stored in an allocator's blocks."""

    def __init__(self, allocator: KVCacheAllocator, layer: int = 0) -> None:
        self.allocator = allocator
        self.layer = layer

    def update_kv_cache(self, k_values: Any, v_values: Any, sequence_id: SequenceId, position: int) -> None:
        """Store K and V of the tokens from `position` on; extend the sequence if it is too short.

        Args:
            k_values, v_values: (num_heads, head_dim) for one token, or (num_tokens, num_heads, head_dim).
        Raises:
            As `KVCacheAllocator.extend_sequence`; InvalidArgumentError: there is a gap before `position`.
        """
        if k_values.dim() == 2:
            k_values, v_values = k_values[None], v_values[None]
        table = self.allocator.find(sequence_id)
        if position > table.length:
            raise InvalidArgumentError(
                f"sequence {sequence_id} has {table.length} tokens; the next one is at {table.length}, "
                f"not {position}"
            )
        num_missing = position + len(k_values) - table.length
        if num_missing > 0:
            self.allocator.extend_sequence(sequence_id, num_missing)
        self.allocator.write(self.layer, sequence_id, position, k_values, v_values)

    def compute_attention(self, query: Any, sequence_id: SequenceId, context_length: int) -> Any:
        """Attend to the first `context_length` tokens with the queries of the last of these tokens.

        Args:
            query: (num_heads, head_dim) for one token, or (num_tokens, num_heads, head_dim).
        Returns:
            The same shape.
        """
        queries = query[None] if query.dim() == 2 else query
        # The allocator returns NumPy arrays if its library is not torch.
        key, value = (
            torch.as_tensor(read).to(queries.dtype)
            for read in self.allocator.read(self.layer, sequence_id, context_length)
        )
        output = attend(queries, key, value)
        return output[0] if query.dim() == 2 else output


def attend(query: Any, key: Any, value: Any) -> Any:
    """Return causal attention of the last tokens (num_queries, heads, dim) over (num_tokens, heads, dim)."""
    num_queries, num_tokens = len(query), len(key)
    positions = torch.arange(num_tokens, device=query.device)
    is_seen = positions[None, :] <= positions[num_tokens - num_queries :, None]
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    return scaled_dot_product_attention(*heads_first, attn_mask=is_seen).transpose(0, 1)


class PagedTransformerLayer(nn.Module):  # type: ignore[misc]
    """A transformer layer that stores K and V in blocks.

    Args:
        layer: the layer of the allocator's storage to use; each layer of a model has its own.
    """

    def __init__(self, d_model: int, n_heads: int, allocator: KVCacheAllocator, layer: int = 0) -> None:
        super().__init__()
        if d_model % n_heads:
            raise InvalidArgumentError(f"d_model is {d_model}, which is not a multiple of n_heads, {n_heads}")
        self.d_model = d_model
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d_model, d_model) for _ in range(4))
        self.paged_attention = PagedAttention(allocator, layer)
        self.ffn = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.attn_norm = nn.LayerNorm(d_model)
        self.ffn_norm = nn.LayerNorm(d_model)

    def forward(self, x: Any, sequence_id: SequenceId, position: int, use_kv_cache: bool = True) -> Any:
        """Compute consecutive tokens of one sequence.

        Args:
            x: (num_tokens, d_model).
            position: position of the first of them.
            use_kv_cache: store K and V, and attend to all earlier tokens; False: attend within `x` only.
        Returns:
            (num_tokens, d_model).
        """
        normed = self.attn_norm(x)
        query, key, value = (
            projection(normed).view(len(x), self.n_heads, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if use_kv_cache:
            storage_dtype = getattr(torch, self.paged_attention.allocator.storage.dtype)
            self.paged_attention.update_kv_cache(
                key.to(storage_dtype), value.to(storage_dtype), sequence_id, position
            )
            attended = self.paged_attention.compute_attention(query, sequence_id, position + len(x))
        else:
            attended = attend(query, key, value)
        x = x + self.o_proj(attended.reshape(len(x), self.d_model))
        return x + self.ffn(self.ffn_norm(x))


@dataclass
class ActiveSequence:
    """The state of a sequence: the last layer's output for its last token, and its length."""

    hidden_state: Any
    length: int


class PagedInferenceEngine:
    """A stack of layers over one allocator, whose blocks fill 70 % of the memory.

    Inputs and outputs are vectors; the caller provides embeddings and vocabulary.

    Args:
        model_config: `n_layers`, `d_model`, `n_heads` and `head_dim`.
        gpu_memory_gb: GiB of the device, from which the number of 16-token blocks is computed.
        dtype, device: of K and V and of the layers.
    Raises:
        InvalidArgumentError: a key is missing, heads and model size do not match, the dtype is unknown, or
            the memory is too small for a block.

    Attributes:
        allocator: the blocks.
        layers: the modules, with random weights.
        active_sequences: the sequences by id.
    """

    def __init__(
        self,
        model_config: Mapping[str, int],
        gpu_memory_gb: float = 24,
        *,
        dtype: str = "float16",
        device: str = "cpu",
    ) -> None:
        missing = sorted({"n_layers", "d_model", "n_heads", "head_dim"} - set(model_config))
        if missing:
            raise InvalidArgumentError(f"model_config lacks {', '.join(missing)}")
        heads, head_dim = model_config["n_heads"], model_config["head_dim"]
        if heads * head_dim != model_config["d_model"]:
            raise InvalidArgumentError(
                f"n_heads is {heads} and head_dim {head_dim}; d_model must be "
                f"{heads * head_dim}, not {model_config['d_model']}"
            )
        torch_dtype = getattr(torch, dtype, None)
        if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype is {dtype!r}; it is float16, bfloat16, float32 or float64")
        total_blocks = KVCacheAllocator.count_blocks(
            gpu_memory_gb * 2**30 * _KV_SHARE,
            _BLOCK_SIZE,
            model_config["n_layers"],
            heads,
            head_dim,
            torch_dtype.itemsize,
        )
        self.model_config = dict(model_config)
        self.allocator = KVCacheAllocator(
            total_blocks,
            _BLOCK_SIZE,
            heads,
            head_dim,
            num_layers=model_config["n_layers"],
            dtype=dtype,
            device=device,
            library="torch",
        )
        self.layers = nn.ModuleList(
            PagedTransformerLayer(model_config["d_model"], heads, self.allocator, layer)
            for layer in range(model_config["n_layers"])
        ).to(device, torch_dtype)
        self.active_sequences: dict[SequenceId, ActiveSequence] = {}
        self._dtype, self._device = torch_dtype, device
        self._next_id = 0

    def create_sequence(self, prompt: Any) -> SequenceId:
        """Compute a prompt, (num_tokens, d_model), and return the new sequence's id.

        The prompt may have any floating-point type and device; it is converted to those of the layers.

        Raises:
            InvalidArgumentError: the prompt is empty or has another shape.
            PoolExhaustedError: too few blocks are free. Nothing has changed.
        """
        if not len(prompt):
            raise InvalidArgumentError("the prompt is empty; it needs at least 1 token")
        if prompt.dim() != 2 or prompt.shape[1] != self.model_config["d_model"]:
            raise InvalidArgumentError(
                f"the prompt has shape {tuple(prompt.shape)}; it must be (num_tokens, d_model), and d_model "
                f"is {self.model_config['d_model']}"
            )
        sequence_id = SequenceId(self._next_id)
        self.allocator.allocate_sequence(sequence_id, len(prompt))
        self._next_id += 1
        hidden = self._compute(prompt.to(self._device, self._dtype), sequence_id, 0)
        self.active_sequences[sequence_id] = ActiveSequence(hidden[-1], len(prompt))
        return sequence_id

    def generate_token(self, sequence_id: SequenceId) -> Any:
        """Feed the last output to the layers as the next token; return the new output, (d_model,).

        Raises:
            UnknownSequenceError: there is no such sequence.
            PoolExhaustedError: the token needs a block and none is free. Nothing has changed.
        """
        sequence = self.active_sequences.get(sequence_id)
        if sequence is None:
            raise UnknownSequenceError(f"there is no sequence {sequence_id}; create_sequence() it first")
        hidden = self._compute(sequence.hidden_state[None], sequence_id, sequence.length)
        self.active_sequences[sequence_id] = ActiveSequence(hidden[-1], sequence.length + 1)
        return hidden[-1]

    def free_sequence(self, sequence_id: SequenceId) -> None:
        """End a sequence and free its blocks.

        Raises:
            UnknownSequenceError: there is no such sequence. Was it freed twice?
        """
        self.allocator.free_sequence(sequence_id)
        del self.active_sequences[sequence_id]

    def _compute(self, hidden: Any, sequence_id: SequenceId, position: int) -> Any:
        with torch.no_grad():
            for layer in self.layers:
                hidden = layer(hidden, sequence_id, position)
        return hidden


def main() -> None:
    torch.manual_seed(0)
    config = {"n_layers": 2, "d_model": 16, "n_heads": 4, "head_dim": 4}
    engine = PagedInferenceEngine(config, gpu_memory_gb=2e-4, dtype="float64")
    inputs = torch.randn(20, 16, dtype=torch.float64)
    sequence_id = engine.create_sequence(inputs)
    print(engine.allocator.sequence_tables[sequence_id])
    for _ in range(15):
        inputs = torch.cat([inputs, engine.active_sequences[sequence_id].hidden_state[None]])
        generated = engine.generate_token(sequence_id)
        hidden = inputs
        with torch.no_grad():
            for layer in engine.layers:
                hidden = layer(hidden, sequence_id, 0, use_kv_cache=False)
        torch.testing.assert_close(generated, hidden[-1])
    print(engine.allocator.sequence_tables[sequence_id])
    print("each token equals the one that is computed without blocks")
    engine.free_sequence(sequence_id)
    print(f"{len(engine.allocator.free_blocks)} of {engine.allocator.total_blocks} blocks are free")


if __name__ == "__main__":
    main()

# prints:
# <SequencePageTable 0: 20 tokens in blocks [0, 1]>
# <SequencePageTable 0: 35 tokens in blocks [0, 1, 2]>
# each token equals the one that is computed without blocks
# 18 of 18 blocks are free
