"""The KV cache groups of a replayed model, such as `full,window:1024`, and the steps that let them cache."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PromptSteps:
    """The division of prompts into steps.

        prompt of 50 tokens, 12 of them hit, max_tokens 16, end_at 4
        |-- 12 hit --|-- 16 --|-- 16 --|- 4 -|-2-|

    Attributes:
        max_tokens: maximum number of tokens per step; None for the whole prompt in one step.
        end_at: a step ends at a multiple of this number of tokens if possible. Groups with a single state
            cache it only if a step ends at the end of a block.
    """

    max_tokens: int | None = None
    end_at: int = 1

    @classmethod
    def for_groups(
        cls, groups: Sequence[KVCacheSpec], max_tokens: int | None, *, at_every_block: bool = False
    ) -> "PromptSteps":
        """Return steps that let these groups cache every block they can.

        Args:
            at_every_block: a step for each block of a group with a single state, so that all are cached.
        """
        end_at = max((spec.block_size for spec in groups if isinstance(spec, MambaSpec)), default=1)
        if at_every_block and end_at > 1:
            max_tokens = end_at if max_tokens is None else min(max_tokens, end_at)
        return cls(max_tokens, end_at)

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < self.end_at:
            raise InvalidArgumentError(
                f"a step of {self.max_tokens} prompt tokens is too short; it needs at least {self.end_at}"
            )

    def count_next(self, start: int, end: int, step_ends: Sequence[int] = ()) -> int:
        """Return the tokens of the next step of a prompt of `end` tokens, `start` of them computed.

        Args:
            step_ends: ascending numbers of tokens at which a step ends, too.
        """
        stop = end if self.max_tokens is None else min(end, start + self.max_tokens)
        for step_end in step_ends:
            if start < step_end < stop:
                return step_end - start
        aligned = stop - stop % self.end_at
        return (aligned if aligned > start else stop) - start
