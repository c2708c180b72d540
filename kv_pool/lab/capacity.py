"""`ModelKV`: the size of a model's KV, by its name or its `config.json`, and the blocks that fit memory."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from kv_pool.errors import InvalidArgumentError, describe_known
from kv_pool.foreign_bytes import BYTE_ORDER_MARK, UNDECODABLE

_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


@dataclass(frozen=True)
class ModelCompute:
    """The dimensions of a model that decide the FLOPs of a prompt, besides those of its KV cache.

    Attributes:
        hidden_size: elements of a token between layers.
        num_heads: query heads.
        intermediate_size: of each feed-forward network, which has three matrices.
        experts_per_token: feed-forward networks that compute a token.
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    experts_per_token: int = 1


@dataclass(frozen=True)
class ModelKV:
    """The dimensions of a model's KV cache, from its configuration.

    Attributes:
        num_layers: number of layers with attention.
        num_kv_heads, head_size: per layer; K and V each have num_kv_heads * head_size elements per token.
        latent_size: elements per token and layer of a latent cache (MLA), which replaces K and V; else 0.
        dtype_bytes: bytes per element.
        compute: what decides the FLOPs of prompts; None if that is not known. It is known of models with
            ordinary attention in all layers. Shared experts and layers of another width are not counted.
    """

    num_layers: int
    num_kv_heads: int = 0
    head_size: int = 0
    latent_size: int = 0
    dtype_bytes: int = 2
    compute: ModelCompute | None = field(default=None, repr=False, compare=False)

    @property
    def bytes_per_token(self) -> int:
        elements = self.latent_size or 2 * self.num_kv_heads * self.head_size
        return self.num_layers * elements * self.dtype_bytes

    def count_flops(self, num_tokens: int) -> int:
        """Return the FLOPs of the first `num_tokens` tokens of a prompt; 0 without `compute`.

        A token takes 2 FLOPs for each weight. Scores of causal attention and their products with V take 2
        FLOPs each, per element, for half of all pairs of tokens.
        """
        model = self.compute
        if model is None:
            return 0
        attention = 2 * model.hidden_size * (model.num_heads + self.num_kv_heads) * self.head_size
        feed_forward = 3 * model.hidden_size * model.intermediate_size * model.experts_per_token
        per_token = 2 * (attention + feed_forward)
        per_pair = 2 * model.num_heads * self.head_size
        return self.num_layers * (per_token * num_tokens + per_pair * num_tokens**2)

    def count_block_bytes(self, block_size: int, num_groups: int = 1) -> int:
        """Return the size in bytes of a block of `block_size` tokens of one KV cache group.

        Each of the `num_groups` groups has an equal share of the layers; fractions are rounded up.

        Raises:
            InvalidArgumentError: the model has no KV.
        """
        block_bytes = -(-self.bytes_per_token * block_size // num_groups)
        if block_bytes < 1:
            raise InvalidArgumentError(f"a model with these dimensions has no KV: {self}")
        return block_bytes


# Source: the models' published configurations. 16-bit KV on one device, no tensor parallelism.
MODELS = {
    "llama-2-7b": ModelKV(32, 32, 128, compute=ModelCompute(4096, 32, 11008)),
    "llama-2-13b": ModelKV(40, 40, 128, compute=ModelCompute(5120, 40, 13824)),
    "llama-2-70b": ModelKV(80, 8, 128, compute=ModelCompute(8192, 64, 28672)),
    "llama-3-8b": ModelKV(32, 8, 128, compute=ModelCompute(4096, 32, 14336)),
    "llama-3-70b": ModelKV(80, 8, 128, compute=ModelCompute(8192, 64, 28672)),
    "llama-3-405b": ModelKV(126, 8, 128, compute=ModelCompute(16384, 128, 53248)),
    "llama-3.2-1b": ModelKV(16, 8, 64, compute=ModelCompute(2048, 32, 8192)),
    "llama-3.2-3b": ModelKV(28, 8, 128, compute=ModelCompute(3072, 24, 8192)),
    "mistral-7b": ModelKV(32, 8, 128, compute=ModelCompute(4096, 32, 14336)),
    "mixtral-8x7b": ModelKV(32, 8, 128, compute=ModelCompute(4096, 32, 14336, 2)),
    "mixtral-8x22b": ModelKV(56, 8, 128, compute=ModelCompute(6144, 48, 16384, 2)),
    "qwen2.5-7b": ModelKV(28, 4, 128, compute=ModelCompute(3584, 28, 18944)),
    "qwen2.5-32b": ModelKV(64, 8, 128, compute=ModelCompute(5120, 40, 27648)),
    "qwen2.5-72b": ModelKV(80, 8, 128, compute=ModelCompute(8192, 64, 29568)),
    "qwen3-8b": ModelKV(36, 8, 128, compute=ModelCompute(4096, 32, 12288)),
    "qwen3-32b": ModelKV(64, 8, 128, compute=ModelCompute(5120, 64, 25600)),
    "qwen3-30b-a3b": ModelKV(48, 4, 128, compute=ModelCompute(2048, 32, 768, 8)),
    "deepseek-v3": ModelKV(61, latent_size=512 + 64),
}


def count_blocks(memory_bytes: int, block_size: int, model: ModelKV, num_groups: int = 1) -> int:
    """Return the number of usable blocks in `memory_bytes`, not counting the null block.

    Args:
        num_groups: number of KV cache groups; see `ModelKV.count_block_bytes`.

    Raises:
        InvalidArgumentError: fewer than two blocks fit, or the model has no KV.
    """
    block_bytes = model.count_block_bytes(block_size, num_groups)
    num_blocks = memory_bytes // block_bytes - 1
    if num_blocks < 1:
        raise InvalidArgumentError(
            f"{memory_bytes} bytes hold {memory_bytes // block_bytes} blocks of {block_bytes} bytes "
            f"({block_size} tokens); a pool needs 2, one of them the null block"
        )
    return num_blocks


def find_model(name: str) -> ModelKV:
    """Return a model by its name in `MODELS`, or by the path of its `config.json` or of the folder with it.

    Raises:
        InvalidArgumentError: the name is not known, or the file cannot be read.
    """
    model = MODELS.get(name.lower())
    if model is not None:
        return model
    if name.endswith(".json") or Path(name, "config.json").is_file():
        return _read_model(name)
    raise InvalidArgumentError(
        f"unknown model {name!r}; {describe_known(name, MODELS)}. For another model give the path of its "
        "config.json, or --num-layers, --num-kv-heads and --head-size"
    )


_Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class _ModelConfig(msgspec.Struct, kw_only=True):
    """The fields of a Hugging Face model configuration that decide its KV cache and its FLOPs.

    Attributes:
        head_dim: elements per head; `hidden_size / num_attention_heads` if it is absent.
        layer_types: the kind of each layer, of hybrid models.
        kv_lora_rank, qk_rope_head_dim: the elements per token of a latent cache (MLA), and those of its
            position part.
        text_config: the configuration of the language model, of models with other inputs.
    """

    num_hidden_layers: _Count = 0
    hidden_size: _Count = 0
    num_attention_heads: _Count = 0
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    layer_types: list[str] | None = None
    kv_lora_rank: _Count | None = None
    qk_rope_head_dim: _Count | None = None
    intermediate_size: _Count = 0
    moe_intermediate_size: _Count | None = None
    num_experts_per_tok: _Count | None = None
    text_config: "_ModelConfig | None" = None


def _read_model(path: str) -> ModelKV:
    """Read a `config.json`, or that of a folder, such as a downloaded model of Hugging Face.

    Raises:
        InvalidArgumentError: the file cannot be read, or has no dimensions of a transformer.
    """
    file = Path(path) if path.endswith(".json") else Path(path, "config.json")
    try:
        config = msgspec.json.decode(file.read_bytes().removeprefix(BYTE_ORDER_MARK), type=_ModelConfig)
    except (OSError, *UNDECODABLE) as error:
        raise InvalidArgumentError(f"cannot read the model configuration {str(file)!r}: {error}") from error
    config = config.text_config or config
    num_layers, num_heads = config.num_hidden_layers, config.num_attention_heads
    if config.layer_types is not None:
        num_layers = sum(kind in _ATTENTION_LAYERS for kind in config.layer_types)
    latent_size = 0 if config.kv_lora_rank is None else config.kv_lora_rank + (config.qk_rope_head_dim or 0)
    num_kv_heads, head_size = 0, 0
    if not latent_size:
        num_kv_heads = num_heads if config.num_key_value_heads is None else config.num_key_value_heads
        head_size = config.head_dim or config.hidden_size // max(1, num_heads)
    if num_layers < 1 or not (latent_size or num_kv_heads * head_size):
        raise InvalidArgumentError(
            f"{str(file)!r} has no num_hidden_layers, or no heads of attention; "
            "give --num-layers, --num-kv-heads and --head-size instead"
        )
    compute = None
    if not latent_size and num_layers == config.num_hidden_layers:
        size = None if config.num_experts_per_tok is None else config.moe_intermediate_size
        size = size or config.intermediate_size
        compute = ModelCompute(config.hidden_size, num_heads, size, config.num_experts_per_tok or 1)
    return ModelKV(num_layers, num_kv_heads, head_size, latent_size, compute=compute)
