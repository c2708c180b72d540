"""`CheckpointChoice`: which full blocks of windows and states a manager caches."""

from mypy_extensions import mypyc_attr

from kv_pool.manager.block_groups.block_group import BlockGroup, SlidingWindowGroup
from kv_pool.manager.block_groups.mamba_group import MambaGroup


# Subclasses may be plain Python: another choice needs no compiled code.
@mypyc_attr(allow_interpreted_subclasses=True)
class CheckpointChoice:
    """Selects blocks by `PrefixRules.retention_interval`: checkpoints, every N tokens, or all.

    window 4, block size 2, alignment 4; the prompt has 19 tokens, the interval is 0
    tokens   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15 | 16 17 | 18
    cached                                         x       x                    a resend hits 16 tokens

    Args:
        interval: the retention interval; None to cache all blocks that can serve a hit.
        alignment: tokens; the least common multiple of all block sizes.
        hit_alignment: tokens; each hit is a multiple of it.
        drops_hits: whether hits drop their last block, for a drafter.
        doubles_junctions: see `RuleDetails`.
        least_hit_blocks: blocks of a window that are cached before each boundary, even if none is needed, as
            for a window of 1 token.
    """

    def __init__(
        self,
        interval: int | None,
        alignment: int,
        hit_alignment: int,
        drops_hits: bool,
        doubles_junctions: bool = True,
        least_hit_blocks: int = 0,
    ) -> None:
        self.interval: int | None = interval
        self.alignment: int = alignment
        self.hit_alignment: int = hit_alignment
        self.drops_hits: bool = drops_hits
        self.doubles_junctions: bool = doubles_junctions
        self.least_hit_blocks: int = least_hit_blocks

    def list_checkpoints(self, num_prompt_tokens: int, junction: int, group: BlockGroup) -> list[int]:
        """Return the positions, in tokens, at which later requests are expected to continue.

        The end of the prompt: for the same prompt, whose last token is computed again, and for a longer one.
        With a drafter, the block before each of them. The junction of a shared prefix, if there is one.
        """
        if self.drops_hits:
            unit = self.alignment
            resent = max(0, (num_prompt_tokens - 1) // unit - 1) * unit
            extended = max(0, num_prompt_tokens // unit - 1) * unit
            checkpoints = [resent] if resent == extended else [resent, extended]
        else:
            checkpoints = [num_prompt_tokens - 1]
        if junction:
            checkpoints.append(junction)
            if group.drops_hits and self.doubles_junctions:
                checkpoints.append(junction - group.block_size)
        return checkpoints

    def find_end(self, num_prompt_tokens: int) -> int:
        """Return the position of the last checkpoint of a prompt, a multiple of the alignment."""
        unit = self.alignment
        if self.drops_hits:
            return max(0, num_prompt_tokens // unit - 1) * unit
        return (num_prompt_tokens - 1) // unit * unit

    def find_middle(self, num_prompt_tokens: int, num_hit: int) -> int:
        """Return the middle of the new part of a prompt that is mostly new; 0 for none.

            |--- hit ---|-------- new --------|
            0        num_hit     middle      end

        If later requests share a part of the new tokens, more than half of a long shared prefix is hit by the
        second request already. It has the state at the junction computed, for the third. A prompt that mostly
        continues a hit needs no middle: later requests that diverge in it continue from the hit, too.
        """
        end = self.find_end(num_prompt_tokens)
        if end - num_hit <= num_hit:
            return 0
        middle = (num_hit + end) // 2 // self.alignment * self.alignment
        return middle if middle > num_hit else 0

    def select(self, group: BlockGroup, first: int, end: int, checkpoints: list[int]) -> list[bool] | None:
        """Return which of the blocks `[first, end)` of a table to cache; None for all.

        Args:
            checkpoints: the result of `list_checkpoints`, or [] for the interval alone.
        """
        if isinstance(group, SlidingWindowGroup):
            return self._select_windows(group, first, end, checkpoints)
        if isinstance(group, MambaGroup) and self.interval is not None:
            return self._select_states(group, first, end, checkpoints, self.interval)
        return None

    def _select_windows(
        self, group: SlidingWindowGroup, first: int, end: int, checkpoints: list[int]
    ) -> list[bool] | None:
        """Select the blocks that hits at the checkpoints, and at multiples of the interval, need."""
        block_size = group.block_size
        num_needed = max(self.least_hit_blocks, group.count_hit_blocks(group.drops_hits))
        shift = 1 if group.drops_hits else 0  # the dropped block lies behind the boundary
        mask = [False] * (end - first)
        interval = self.hit_alignment if self.interval is None else self.interval
        if interval:
            per_segment = interval // block_size
            if num_needed >= per_segment:
                return None
            for position in range(max(first, shift), end):
                if (position - shift) % per_segment >= per_segment - num_needed:
                    mask[position - first] = True
        if self.interval is not None:
            for checkpoint in checkpoints:
                boundary = checkpoint // self.hit_alignment * self.hit_alignment // block_size + shift
                for position in range(max(first, boundary - num_needed), min(end, boundary)):
                    mask[position - first] = True
        return mask

    def _select_states(
        self, group: MambaGroup, first: int, end: int, checkpoints: list[int], interval: int
    ) -> list[bool] | None:
        """Select the states at the checkpoints, and at multiples of the interval."""
        block_size = group.block_size
        mask = [False] * (end - first)
        if interval:
            per_segment = interval // block_size
            if per_segment <= 1:
                return None
            for position in range((first // per_segment + 1) * per_segment - 1, end, per_segment):
                mask[position - first] = True
        for checkpoint in checkpoints:
            position = checkpoint // self.hit_alignment * self.hit_alignment // block_size - 1
            if first <= position < end:
                mask[position - first] = True
        return mask
