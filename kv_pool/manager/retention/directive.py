"""`RetentionDirective`: how long to keep the blocks of some of a request's tokens."""

from dataclasses import dataclass
from math import inf
from typing import Final

from kv_pool.errors import InvalidArgumentError

DEFAULT_PRIORITY: Final = 35
"""The priority of a block without a directive."""

MAX_PRIORITY: Final = 100


@dataclass(frozen=True)
class RetentionDirective:
    """A rule for retaining the cached blocks of some of a request's tokens when no request uses them.

        >>> from kv_pool.manager.retention.directive import RetentionDirective
        >>> system_prompt = RetentionDirective(0, 1000, priority=90)
        >>> for_a_minute = RetentionDirective(0, duration_s=60.0)

    A directive covers a block if any of the block's tokens is in `[start, end)`. If several directives cover
    a block, of one request or of several that shared it, the strongest of those in force applies.

    Args:
        start, end: tokens of the request; None: to its end, as it grows.
        priority: 0 to 100. 35 is the priority of a block without a directive; blocks of lower priority are
            evicted before such blocks, blocks of higher priority after them. Scale and default are
            TensorRT-LLM's.
        duration_s: seconds of the retention's clock for which the directive is in force, counted each time
            from the moment at which the block becomes free. Afterwards the block is evicted before all others
            with content. None: as long as the block is cached.
        pin: never evict the block while the directive is in force; `priority` has no effect then.

    A directive of priority 35 without duration and pin has no effect. One of priority 35 with a duration
    outranks, while in force, blocks without a directive.
    """

    start: int = 0
    end: int | None = None
    priority: int = DEFAULT_PRIORITY
    duration_s: float | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise InvalidArgumentError(
                f"a directive for tokens {self.start} to {self.end} covers none; start must be 0 or more, "
                "and end above it"
            )
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidArgumentError(f"the priority is {self.priority}; it must be 0 to {MAX_PRIORITY}")
        if self.duration_s is not None and not 0 < self.duration_s < inf:
            raise InvalidArgumentError(
                f"duration_s is {self.duration_s}; it counts seconds, more than 0 (use priority=0 for blocks "
                "that need not be kept)"
            )
        if self.pin and self.end is None:
            raise InvalidArgumentError("a pin needs an end, so that the number of blocks to pin is known")

    @property
    def is_none(self) -> bool:
        """True if the directive has no effect."""
        return self.priority == DEFAULT_PRIORITY and self.duration_s is None and not self.pin
