"""`KVCacheSpec`: what the layers of a KV cache group keep: all tokens, a window, a chunk, a state, none."""

from dataclasses import dataclass
from typing import ClassVar

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import GroupId
from kv_pool.manager.block_groups import block_group
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.mamba_group import MambaGroup


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """A KV cache group: layers of one kind that share block ids.

    Attributes:
        block_size: tokens per block.
        kind: the name of the group's kind in events, as in vLLM.
    """

    kind: ClassVar[str] = "unknown"
    is_cacheable: ClassVar[bool] = True
    group_class: ClassVar[type[BlockGroup] | None] = None
    # Whether a hit may end within a block, of which the request then gets a copy.
    has_partial_hits: ClassVar[bool] = False

    block_size: int

    def __post_init__(self) -> None:
        _check(self, "block_size", 1)

    def make_group(self, pool: BlockPoolCore, group_id: GroupId) -> BlockGroup:
        """Return the group that this spec describes. A spec of no kind raises InvalidTypeError."""
        if self.group_class is None:
            raise InvalidTypeError(
                f"{self!r} is not a spec of a KV cache group; see kv_pool.manager.block_groups.kv_cache_spec"
            )
        return self.group_class(self, pool, group_id)


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Each token attends to all tokens before it: no block is released before the request ends."""

    kind: ClassVar[str] = "full_attention"
    group_class: ClassVar[type[BlockGroup] | None] = BlockGroup
    has_partial_hits: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """Each token attends to itself and the `sliding_window - 1` tokens before it.

    Attributes:
        extra_retained_tokens: tokens before the window whose blocks stay in the table. A drafter with several
            modules may compute the last tokens of a sequence again, with earlier windows.
    """

    kind: ClassVar[str] = "sliding_window"
    group_class: ClassVar[type[BlockGroup] | None] = block_group.SlidingWindowGroup

    sliding_window: int
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "sliding_window", 1)
        _check(self, "extra_retained_tokens", 0)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """Each token attends to the tokens before it in its own chunk of `attention_chunk_size`."""

    kind: ClassVar[str] = "chunked_local_attention"
    group_class: ClassVar[type[BlockGroup] | None] = block_group.ChunkedLocalGroup

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "attention_chunk_size", 1)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """One state per request, in one block; copies at block ends are kept for requests that continue there.

    The state after token n is in the block that holds token n. A step that ends in a later block than the
    previous step reads that step's state and writes a new one; only a state at a block's end can be hit.

    Attributes:
        num_speculative_blocks: further blocks per request, at the end of its table, for the states after
            draft tokens.
        has_states_at_block_ends: False: one block per request, whatever its length, with a block size of at
            least the longest request; needs a pool without caching. vLLM: `mamba_cache_mode="none"`.
        prefill_checkpoint_alignment: the model can save one state in the middle of a step, this many tokens
            or a multiple of it after the step's first token. None: it cannot. Needs `PrefixRules`.
    """

    kind: ClassVar[str] = "mamba"
    has_partial_hits: ClassVar[bool] = True

    num_speculative_blocks: int = 0
    has_states_at_block_ends: bool = True
    prefill_checkpoint_alignment: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "num_speculative_blocks", 0)
        if self.prefill_checkpoint_alignment is not None:
            _check(self, "prefill_checkpoint_alignment", 1)

    def make_group(self, pool: BlockPoolCore, group_id: GroupId) -> BlockGroup:
        if self.has_states_at_block_ends:
            return MambaGroup(self, pool, group_id)
        if pool.enable_caching:
            raise InvalidArgumentError(
                "a MambaSpec without has_states_at_block_ends has no states to cache; create the pool "
                "with enable_caching=False"
            )
        return block_group.SingleStateGroup(self, pool, group_id)


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(KVCacheSpec):
    """Tokens attend to the encoder's output: blocks for `num_encoder_tokens`, taken at once, never shared.

    K and V of the other groups then depend on the encoder's input. Only requests whose hashes cover that are
    cached: with `mm_features`, all of which must overlap the first block, or without them with a salt.
    """

    kind: ClassVar[str] = "cross_attention"
    group_class: ClassVar[type[BlockGroup] | None] = block_group.CrossAttentionGroup
    is_cacheable: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(KVCacheSpec):
    """All tokens are computed at once and nothing is kept: no blocks.

    Each token also attends to later ones, so K and V of other groups depend on the whole prompt. Beside such
    groups only requests with a salt are cached, and equal salts must mean equal prompts.
    """

    kind: ClassVar[str] = "encoder_only_attention"
    group_class: ClassVar[type[BlockGroup] | None] = block_group.EncoderOnlyGroup
    is_cacheable: ClassVar[bool] = False


def _check(spec: KVCacheSpec, name: str, least: int) -> None:
    value: object = getattr(spec, name)
    if not isinstance(value, int) or value < least:
        raise InvalidArgumentError(
            f"{name} of a {type(spec).__name__} is {value!r}; it is a count, {least} or more"
        )
