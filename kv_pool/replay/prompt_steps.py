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
