"""`PromptSteps`: divides the computation of prompts into steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec, MambaSpec


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
    def for_groups(cls, groups: Sequence[KVCacheSpec], max_tokens: int | None) -> "PromptSteps":
        """Return steps that let these groups cache every block they can."""
        sizes = [spec.block_size for spec in groups if isinstance(spec, MambaSpec)]
        return cls(max_tokens, max(sizes, default=1))

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < self.end_at:
            raise InvalidArgumentError(
                f"a step of {self.max_tokens} prompt tokens is too short; it needs at least {self.end_at}"
            )

    def count_next(self, start: int, end: int) -> int:
        """Return the tokens of the next step of a prompt of `end` tokens, `start` of them computed."""
        stop = end if self.max_tokens is None else min(end, start + self.max_tokens)
        aligned = stop - stop % self.end_at
        return (aligned if aligned > start else stop) - start
