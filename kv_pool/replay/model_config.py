"""`ModelConfig`: the dimensions of a model, read from its `config.json`."""

from pathlib import Path
from typing import Annotated

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.foreign_bytes import BYTE_ORDER_MARK, UNDECODABLE

_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")


_Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class ModelConfig(msgspec.Struct, kw_only=True):
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
    text_config: "ModelConfig | None" = None

    @property
    def num_attention_layers(self) -> int:
        if self.layer_types is None:
            return self.num_hidden_layers
        return sum(kind in _ATTENTION_LAYERS for kind in self.layer_types)

    @property
    def num_kv_heads(self) -> int:
        heads = self.num_key_value_heads
        return self.num_attention_heads if heads is None else heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // max(1, self.num_attention_heads)

    @property
    def latent_size(self) -> int:
        return 0 if self.kv_lora_rank is None else self.kv_lora_rank + (self.qk_rope_head_dim or 0)


def is_config_path(name: str) -> bool:
    """Return True if a model is named by its `config.json`, or by the folder that has it."""
    return name.endswith(".json") or Path(name, "config.json").is_file()


def read_model_config(path: str) -> ModelConfig:
    """Read a `config.json`, or that of a folder, such as a downloaded model of Hugging Face.

    Raises:
        InvalidArgumentError: the file cannot be read, or has no dimensions of a transformer.
    """
    file = Path(path) if path.endswith(".json") else Path(path, "config.json")
    try:
        config = msgspec.json.decode(file.read_bytes().removeprefix(BYTE_ORDER_MARK), type=ModelConfig)
    except (OSError, *UNDECODABLE) as error:
        raise InvalidArgumentError(f"cannot read the model configuration {str(file)!r}: {error}") from error
    config = config.text_config or config
    has_kv = config.latent_size > 0 or config.num_kv_heads * config.head_size > 0
    if config.num_attention_layers < 1 or not has_kv:
        raise InvalidArgumentError(
            f"{str(file)!r} has no num_hidden_layers, or no heads of attention; "
            "give --num-layers, --num-kv-heads and --head-size instead"
        )
    return config
