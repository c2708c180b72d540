"""`KVCacheSpec`: what the layers of a KV cache group keep: all tokens, a window, a chunk, a state, none."""

from dataclasses import dataclass
from typing import ClassVar

from kv_pool.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """A KV cache group: layers of one kind that share block ids.

    Attributes:
        block_size: tokens per block.
        kind: the name of the group's kind in events, as in vLLM.
    """

    kind: ClassVar[str] = "unknown"
    is_cacheable: ClassVar[bool] = True

    block_size: int

    def __post_init__(self) -> None:
        _check_tokens(type(self).__name__, "block_size", self.block_size)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Each token attends to all tokens before it: no block is released before the request ends."""

    kind: ClassVar[str] = "full_attention"


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """Each token attends to itself and the `sliding_window - 1` tokens before it."""

    kind: ClassVar[str] = "sliding_window"

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tokens(type(self).__name__, "sliding_window", self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """Each token attends to the tokens before it in its own chunk of `attention_chunk_size`."""

    kind: ClassVar[str] = "chunked_local_attention"

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tokens(type(self).__name__, "attention_chunk_size", self.attention_chunk_size)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """One state per request, in one block; copies at block ends are kept for requests that continue there.

    The state after token n is in the block that holds token n. A step that ends in a later block than the
    previous step reads that step's state and writes a new one; only a state at a block's end can be hit.
    """

    kind: ClassVar[str] = "mamba"


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(KVCacheSpec):
    """Tokens attend to the encoder's output: blocks for `num_encoder_tokens`, taken at once, never shared."""

    kind: ClassVar[str] = "cross_attention"
    is_cacheable: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(KVCacheSpec):
    """All tokens are computed at once and nothing is kept: no blocks."""

    kind: ClassVar[str] = "encoder_only_attention"
    is_cacheable: ClassVar[bool] = False


def _check_tokens(spec: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name} of a {spec} is {value!r}; it counts tokens, at least 1")
