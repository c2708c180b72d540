"""The KV cache groups of a replayed model, such as `full,window:1024`, and where their states stay cached."""

from typing import Final

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.prefix_rules import PrefixRules

FORMAT = "full, window:TOKENS, chunked:TOKENS or mamba, separated by commas"


def parse_groups(text: str, block_size: int) -> list[KVCacheSpec]:
    """Return the groups in the order of the text, all with the same block size.

    Each group has an equal share of the layers. `full,window:1024,window:1024` describes a model in which
    every third layer attends to all tokens, and the other layers to the last 1,024.
    Raises:
        InvalidArgumentError: the text has another form.
    """
    return [_parse_group(part.strip(), block_size, text) for part in text.split(",")]


def _parse_group(part: str, block_size: int, text: str) -> KVCacheSpec:
    kind, colon, tokens = part.partition(":")
    if part == "full":
        return FullAttentionSpec(block_size=block_size)
    if part == "mamba":
        return MambaSpec(block_size=block_size)
    # int() would also accept signs, spaces and underscores.
    if kind in ("window", "chunked") and colon and tokens.isascii() and tokens.isdigit() and int(tokens):
        if kind == "window":
            return SlidingWindowSpec(block_size=block_size, sliding_window=int(tokens))
        return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=int(tokens))
    raise InvalidArgumentError(f"{part!r} in groups {text!r} is not a group; write {FORMAT}")


STATES: Final = ("steps", "blocks", "checkpoints", "bounded")
"""The rules for where states and windows stay cached.

    steps        at the end of each step
    blocks       at the end of each block; each step computes one block
    checkpoints  at the end of each prompt and where shared prefixes end: vLLM 0.33's default
    bounded      as checkpoints, also in the middle of new prompts, and at most the ends of two turns
"""


def make_prefix_rules(states: str) -> PrefixRules | None:
    """Return the manager's rules for one of `STATES`; None for its default, which caches all it can."""
    if states == "checkpoints":
        return PrefixRules(retention_interval=0)
    if states == "bounded":
        return PrefixRules(retention_interval=0, bounded_states=True)
    return None
