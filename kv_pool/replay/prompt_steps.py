"""`PromptSteps`: how much of a prompt is computed in one step."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.kv_cache_spec import KVCacheSpec, MambaSpec


@dataclass(frozen=True)
class PromptSteps:
    """Cuts prompts into steps.

        prompt of 50 tokens, 12 of them hit, max_tokens 16, end_at 4
        |-- 12 hit --|-- 16 --|-- 16 --|- 4 -|-2-|

    Attributes:
        max_tokens: of one step; None for a whole prompt at once.
        end_at: a step ends at a multiple of so many tokens if it can: for groups that keep one state, which
            is cached only where a step ends at a block's end.
    """

    max_tokens: int | None = None
    end_at: int = 1

    @classmethod
    def for_groups(cls, groups: Sequence[KVCacheSpec], max_tokens: int | None) -> "PromptSteps":
        """Steps after which all that these groups can cache is cached."""
        sizes = [spec.block_size for spec in groups if isinstance(spec, MambaSpec)]
        return cls(max_tokens, max(sizes, default=1))

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < self.end_at:
            raise InvalidArgumentError(
                f"a step of {self.max_tokens} prompt tokens is too short; it has {self.end_at} or more"
            )

    def count_next(self, start: int, end: int) -> int:
        """Tokens of the next step of a prompt that is computed up to `start` and has `end` tokens."""
        stop = end if self.max_tokens is None else min(end, start + self.max_tokens)
        aligned = stop - stop % self.end_at
        return (aligned if aligned > start else stop) - start
