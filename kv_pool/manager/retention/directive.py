"""`RetentionDirective`: what a scheduler says of some of a request's tokens."""

from dataclasses import dataclass
from math import inf
from typing import Final

from kv_pool.errors import InvalidArgumentError

DEFAULT_PRIORITY: Final = 35
"""What a block without a directive is worth."""

MAX_PRIORITY: Final = 100


@dataclass(frozen=True)
class RetentionDirective:
    """How much the cached blocks of some of a request's tokens are worth once nobody uses them.

        >>> from kv_pool.manager.retention.directive import RetentionDirective
        >>> system_prompt = RetentionDirective(0, 1000, priority=90)
        >>> for_a_minute = RetentionDirective(0, duration_s=60.0)

    A block counts as covered when any of its tokens is in `[start, end)`. Where several directives cover a
    block, of one request or of several that shared it, the strongest of those that are still in force counts.

    Args:
        start, end: tokens of the request; None: to its end, however long it becomes.
        priority: 0 to 100. 35 is what a block without a directive is worth; lower goes before such blocks,
            higher after them. The scale and its default are TensorRT-LLM's.
        duration_s: how long the directive is in force, in seconds of the retention's clock, each time counted
            from the moment the block becomes free (nobody uses it). When time is up the block goes before all
            others with content. None: for as long as the block is cached.
        pin: never give the block up while the directive is in force; the priority says nothing then.

    A directive of 35 without duration and pin means: none. One of 35 with a duration outranks, while in
    force, blocks without any.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise InvalidArgumentError(
                f"a directive for tokens {self.start} to {self.end} covers none; start is 0 or more, end "
                "above it"
            )
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidArgumentError(f"the priority is {self.priority}; it goes from 0 to {MAX_PRIORITY}")
        if self.duration_s is not None and not 0 < self.duration_s < inf:
            raise InvalidArgumentError(
                f"duration_s is {self.duration_s}; it counts seconds, more than 0 (for blocks that need not "
                "be kept at all there is priority=0)"
            )
        if self.pin and self.end is None:
            raise InvalidArgumentError("a pin needs an end, or nobody knows how many blocks it will pin")

    @property
    def is_none(self) -> bool:
        """Does it say what is so without it?"""
        return self.priority == DEFAULT_PRIORITY and self.duration_s is None and not self.pin
