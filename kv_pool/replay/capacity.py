"""How many blocks fit into so much memory, for a given model."""

import re
from dataclasses import dataclass
from fractions import Fraction

from kv_pool.errors import InvalidArgumentError


@dataclass(frozen=True)
class ModelKV:
    """The KV cache of a model, as its configuration gives it.

    Attributes:
        num_layers: layers with attention.
        num_kv_heads, head_size: per layer; K and V each hold num_kv_heads * head_size elements a token.
        latent_size: elements a token and layer of a latent cache (MLA), which replaces K and V; 0 for none.
        dtype_bytes: bytes per element.
    """

    num_layers: int
    num_kv_heads: int = 0
    head_size: int = 0
    latent_size: int = 0
    dtype_bytes: int = 2

    @property
    def bytes_per_token(self) -> int:
        elements = self.latent_size or 2 * self.num_kv_heads * self.head_size
        return self.num_layers * elements * self.dtype_bytes

    def count_block_bytes(self, block_size: int, num_groups: int = 1) -> int:
        """Bytes of a block of `block_size` tokens, where each of the KV cache groups has an equal share of
        the layers, the last one perhaps a part of one less.

        Raises:
            InvalidArgumentError: the model has no KV.
        """
        block_bytes = -(-self.bytes_per_token * block_size // num_groups)
        if block_bytes < 1:
            raise InvalidArgumentError(f"a model with these dimensions has no KV: {self}")
        return block_bytes


# From the models' published configurations; 16-bit KV on one device, no tensor parallelism.
MODELS = {
    "llama-2-7b": ModelKV(32, 32, 128),
    "llama-2-13b": ModelKV(40, 40, 128),
    "llama-2-70b": ModelKV(80, 8, 128),
    "llama-3-8b": ModelKV(32, 8, 128),
    "llama-3-70b": ModelKV(80, 8, 128),
    "llama-3-405b": ModelKV(126, 8, 128),
    "llama-3.2-1b": ModelKV(16, 8, 64),
    "llama-3.2-3b": ModelKV(28, 8, 128),
    "mistral-7b": ModelKV(32, 8, 128),
    "mixtral-8x7b": ModelKV(32, 8, 128),
    "mixtral-8x22b": ModelKV(56, 8, 128),
    "qwen2.5-7b": ModelKV(28, 4, 128),
    "qwen2.5-32b": ModelKV(64, 8, 128),
    "qwen2.5-72b": ModelKV(80, 8, 128),
    "qwen3-8b": ModelKV(36, 8, 128),
    "qwen3-32b": ModelKV(64, 8, 128),
    "qwen3-30b-a3b": ModelKV(48, 4, 128),
    "deepseek-v3": ModelKV(61, latent_size=512 + 64),
}

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_memory(text: str) -> int:
    """Bytes of a size such as `40GiB`, `40GB`, `512MiB` or `1000000`. Raises InvalidArgumentError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if found is None:
        raise InvalidArgumentError(f"{text!r} is not a size; write it as 40GiB, 512MiB or 40GB")
    unit = found[2] or ""
    return int(Fraction(found[1]) * (_UNITS.get(unit) or _BINARY_UNITS[unit]))


def parse_rate(text: str) -> float:
    """Bytes a second of `100MB/s`, `1GiB/s` or `100MB`. Raises InvalidArgumentError for anything else."""
    size = text.strip().removesuffix("/s")
    try:
        rate = parse_memory(size)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{text!r} is no rate; write it as 100MB/s or 1GiB/s") from error
    if rate < 1:
        raise InvalidArgumentError(f"a rate of {text!r} is no rate at all")
    return float(rate)


def count_blocks(memory_bytes: int, block_size: int, model: ModelKV, num_groups: int = 1) -> int:
    """Blocks that can be handed out of `memory_bytes`, one more being set aside as null block.

    Args:
        num_groups: KV cache groups; a block is of one of them, see `ModelKV.count_block_bytes`.

    Raises:
        InvalidArgumentError: not even two blocks fit, or the model has no KV.
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
    """A model of the table, by name. Raises InvalidArgumentError naming those there are."""
    model = MODELS.get(name.lower())
    if model is None:
        raise InvalidArgumentError(
            f"unknown model {name!r}; known are {', '.join(MODELS)}. "
            "Any other: give --num-layers, --num-kv-heads and --head-size"
        )
    return model
