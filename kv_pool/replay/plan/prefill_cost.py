"""`PrefillTally`: how much less of the prompts a cache leaves to compute, in tokens and in FLOPs."""

from dataclasses import dataclass

from kv_pool.replay.capacity import ModelKV, is_config_path, read_model_config
from kv_pool.replay.request_outcomes import RequestOutcome


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

    def count_linear_flops(self, kv: ModelKV) -> int:
        """Return the FLOPs of a token in all matrices of the layers: 2 for each weight."""
        attention = 2 * self.hidden_size * (self.num_heads + kv.num_kv_heads) * kv.head_size
        feed_forward = 3 * self.hidden_size * self.intermediate_size * self.experts_per_token
        return 2 * kv.num_layers * (attention + feed_forward)

    def count_attention_flops(self, kv: ModelKV) -> int:
        """Return the FLOPs of a prompt's causal attention, divided by the square of its tokens.

        Scores and their products with V take 2 FLOPs each, per element, for half of all pairs of tokens.
        """
        return 2 * kv.num_layers * self.num_heads * kv.head_size


# Source: the models' published configurations. deepseek-v3 has latent attention and is not included.
COMPUTES = {
    "llama-2-7b": ModelCompute(4096, 32, 11008),
    "llama-2-13b": ModelCompute(5120, 40, 13824),
    "llama-2-70b": ModelCompute(8192, 64, 28672),
    "llama-3-8b": ModelCompute(4096, 32, 14336),
    "llama-3-70b": ModelCompute(8192, 64, 28672),
    "llama-3-405b": ModelCompute(16384, 128, 53248),
    "llama-3.2-1b": ModelCompute(2048, 32, 8192),
    "llama-3.2-3b": ModelCompute(3072, 24, 8192),
    "mistral-7b": ModelCompute(4096, 32, 14336),
    "mixtral-8x7b": ModelCompute(4096, 32, 14336, 2),
    "mixtral-8x22b": ModelCompute(6144, 48, 16384, 2),
    "qwen2.5-7b": ModelCompute(3584, 28, 18944),
    "qwen2.5-32b": ModelCompute(5120, 40, 27648),
    "qwen2.5-72b": ModelCompute(8192, 64, 29568),
    "qwen3-8b": ModelCompute(4096, 32, 12288),
    "qwen3-32b": ModelCompute(5120, 64, 25600),
    "qwen3-30b-a3b": ModelCompute(2048, 32, 768, 8),
}


def find_compute(name: str) -> ModelCompute | None:
    """Return what decides the FLOPs of a model, named as for `find_model`; None if that is not known.

    It is known of models with ordinary attention in all layers. Shared experts and layers of another width
    are not counted.
    """
    known = COMPUTES.get(name.lower())
    if known is not None or not is_config_path(name):
        return known
    config = read_model_config(name)
    if config.latent_size or config.num_attention_layers != config.num_hidden_layers:
        return None
    experts = config.num_experts_per_tok
    size = config.intermediate_size if experts is None else config.moe_intermediate_size
    return ModelCompute(
        config.hidden_size, config.num_attention_heads, size or config.intermediate_size, experts or 1
    )


class PrefillTally:
    """Sums what the prompts of a replay cost with and without its hits. Pass `add` as `on_outcome`.

    Args:
        kv, compute: the model; without `compute`, FLOPs are not counted.
    """

    def __init__(self, kv: ModelKV, compute: ModelCompute | None) -> None:
        self._has_flops = compute is not None
        self._linear = 0 if compute is None else compute.count_linear_flops(kv)
        self._attention = 0 if compute is None else compute.count_attention_flops(kv)
        self._tokens = self._tokens_hit = 0
        self._flops = self._flops_saved = 0

    def add(self, outcome: RequestOutcome) -> None:
        """Count the prompt of a request and its hit."""
        length, hit = outcome.input_length, outcome.tokens_hit
        self._tokens += length
        self._tokens_hit += hit
        self._flops += self._linear * length + self._attention * length**2
        self._flops_saved += self._linear * hit + self._attention * hit**2

    def divide_tokens(self) -> float | None:
        """Return the prompt tokens divided by those to compute; None if nothing is left to compute."""
        return _divide(self._tokens, self._tokens_hit)

    def divide_flops(self) -> float | None:
        """Return the FLOPs of all prompts divided by those to compute; None if they are not known."""
        return _divide(self._flops, self._flops_saved) if self._has_flops else None


def _divide(total: int, saved: int) -> float | None:
    return total / (total - saved) if total > saved else None
