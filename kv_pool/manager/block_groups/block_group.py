"""`BlockGroup`: how one KV cache group uses blocks; the base class implements full attention.

`EqualGroups`: groups whose prefixes are looked up together. `PrefixLookup`: finds a `CachedPrefix`, the
longest prefix from which all groups of a request can continue.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mypy_extensions import mypyc_attr

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.ids import BlockHash, GroupId, RequestId
from kv_pool.manager.block_groups.block_table import BlockTable, GroupPlan, Step

NO_BLOCKS: Final[Sequence[KVCacheBlock]] = ()


@mypyc_attr(allow_interpreted_subclasses=False)
class BlockGroup:
    """One KV cache group over a pool. The base class keeps every token: full attention.

    Args:
        spec: the `KVCacheSpec` of this class.
        pool: the pool that the blocks come from.
        group_id: its index among the manager's groups.
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        self.pool: BlockPoolCore = pool
        self.group_id: GroupId = group_id
        self.block_size: int = spec.block_size
        self.stride: int = max(1, self.block_size // pool.hash_block_size)
        self.is_cacheable: bool = spec.is_cacheable
        # Whether blocks are released while the request runs, which costs a check in each step. Then hits need
        # the last blocks only; otherwise all from the head of a sequence on.
        self.forgets: bool = False
        # Most tokens before the next one whose blocks are kept; -1 for all. Whether they may start anywhere
        # in a block, so that they take one block more.
        self.num_kept: int = -1
        self.starts_anywhere: bool = False
        # Whether the content is a state after the last token, from which no request can go back.
        self.is_state: bool = False
        # Whether a step reads before it writes: then no request can hit a block that the same step writes.
        self.reads_before_writes: bool = False
        # Whether hits drop their last block, for a drafter; see `PrefixRules.eagle_groups`.
        self.drops_hits: bool = False
        # Whether its layers read later tokens as well, so that K and V of the next layers depend on them.
        self.reads_whole_sequence: bool = False

    def list_hashes(self, block_hashes: list[BlockHash]) -> list[BlockHash]:
        """Select this group's hashes from those at the pool's `hash_block_size`."""
        if self.stride == 1:
            return block_hashes
        return block_hashes[self.stride - 1 :: self.stride]

    def find(
        self, together: "EqualGroups", hashes: list[BlockHash], max_num_tokens: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the longest prefix of these groups, of which this one is the first.

        All blocks from the head on; with partial hits also a cached part of the next one.

        Args:
            hashes: at the pool's `hash_block_size`.
            drops: find the last block of the hit, and drop it.
        Returns:
            The blocks, one list per group, and the number of their tokens.
        """
        block_size = self.block_size
        own = self.list_hashes(hashes)
        found = together.find_from(own, min(len(own), max_num_tokens // block_size))
        num_tokens = len(found[0]) * block_size
        if together.is_partial:
            stride = block_size // together.unit
            start = len(found[0]) * stride
            end = min(start + stride - 1, max_num_tokens // together.unit, len(hashes))
            for index in range(end - 1, start - 1, -1):
                if together.append(found, hashes[index]):
                    num_tokens = (index + 1) * together.unit
                    break
        if drops and num_tokens > 0:
            num_tokens -= min(together.alignment, block_size)
        num_tokens -= num_tokens % together.alignment
        num_blocks = -(-num_tokens // block_size)
        for blocks in found:
            del blocks[num_blocks:]
        return found, num_tokens

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return the number of leading tokens that no token after the computed ones attends to."""
        return 0

    def count_table_blocks(self, num_tokens: int) -> int:
        """Return the number of block table entries for this many tokens, null entries included.

        Args:
            num_tokens: tokens of the sequence; for cross-attention, of the encoder.
        """
        return -(-num_tokens // self.block_size)

    def count_entries(self, step: Step) -> int:
        """Return the number of block table entries after a step, null entries included."""
        return self.count_table_blocks(step.num_scheduled + step.num_lookahead)

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        """Return True if a step changes nothing in the table: it adds, releases, copies and caches no block.

        Args:
            caches: whether full blocks are cached.
        """
        block_size = self.block_size
        num_slots = len(table.blocks) * block_size
        if table.copy_position >= 0 or step.num_scheduled + step.num_lookahead > num_slots:
            return False
        if caches and step.num_scheduled >= (table.num_cached_blocks + 1) * block_size:
            return False
        if not self.forgets:
            return True
        return self.count_skipped_tokens(step.num_final) < (table.num_null_blocks + 1) * block_size

    def plan(self, step: Step, plan: GroupPlan) -> None:
        """Plan what the step takes.

        Args:
            plan: a new one, in which only `shared` is set.
        """
        if step.tables is not None:
            num_entries = len(step.tables[self.group_id].blocks)
            plan.need = len(plan.shared)
        else:
            num_entries = self.plan_start(step, plan)
            # A window of 1 after the external tokens reads none of them.
            if (
                step.num_external
                and self.is_cacheable
                and self.count_skipped_tokens(step.num_before) < step.num_before
            ):
                plan.num_external = max(0, self.count_table_blocks(step.num_before) - num_entries)
                num_entries += plan.num_external
        plan.num_new = max(0, self.count_entries(step) - num_entries)
        plan.need += plan.num_external + plan.num_new

    def plan_start(self, step: Step, plan: GroupPlan) -> int:
        """Plan the entries that a new table starts with, and return their number."""
        hits = step.prefix_blocks[self.group_id]
        is_alone = step.is_alone
        if self.forgets:
            plan.num_nulls = self.count_skipped_tokens(step.num_before) // self.block_size
        for position in range(plan.num_nulls, len(hits)):
            block = hits[position]
            if (is_alone or block.ref_cnt == 0) and not block.is_null:
                plan.need += 1
        if step.num_prefix % self.block_size and hits:
            plan.need += 1  # the copy of the block in which the hit ends
        return max(plan.num_nulls, len(hits))

    def arrange(self, table: BlockTable, plan: GroupPlan) -> Sequence[KVCacheBlock]:
        """Prepare a table for the blocks to append; return the entries appended so far. See `MambaGroup`."""
        return NO_BLOCKS

    def count_sequence(self, step: Step, num_tokens: int, num_most: int) -> int:
        """Count the free blocks that a request needs until all its `num_tokens` tokens have slots.

        Args:
            num_most: the result of `count_max_blocks`.
        """
        if step.tables is not None:
            return max(0, num_most - len(step.tables[self.group_id].blocks))
        plan = GroupPlan()
        num_entries = self.plan_start(step, plan)
        return plan.need + max(0, num_most - num_entries)

    def count_surplus(self, table: BlockTable, num_tokens: int) -> int:
        """Count the blocks of rejected drafts beyond those of `num_tokens` tokens: see `MambaGroup`."""
        return 0

    def find_first_written(self, num_computed_tokens: int, num_blocks: int) -> int:
        """Return the first table entry that a step writes to if it starts after the computed tokens."""
        return num_computed_tokens // self.block_size

    def count_max_blocks(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that a request of `num_tokens` tokens holds at any time.

        Args:
            max_in_flight_tokens: most tokens scheduled in one step; 0 for no bound.
            max_model_len: most tokens of a request; 0 for no bound.
        """
        num_blocks = self.count_table_blocks(num_tokens)
        if self.num_kept < 0 or not max_in_flight_tokens:
            return num_blocks
        num_most = self.num_kept + max_in_flight_tokens
        if max_model_len:
            num_most = min(num_most, max_model_len)
        return min(num_blocks, -(-num_most // self.block_size) + self.starts_anywhere)


@mypyc_attr(allow_interpreted_subclasses=False)
class EqualGroups:
    """Groups that are looked up together, because they keep the same tokens.

    Args:
        alignment: tokens; each hit is a multiple of it.
        drops_hits: whether hits drop their last block, for a drafter.
    """

    def __init__(self, groups: list[BlockGroup], alignment: int, drops_hits: bool) -> None:
        first = groups[0]
        unit = first.pool.hash_block_size
        self.pool: BlockPoolCore = first.pool
        self.first: BlockGroup = first
        self.group_ids: list[GroupId] = [group.group_id for group in groups]
        self.alignment: int = alignment
        self.unit: int = unit
        self.drops_hits: bool = drops_hits
        self.is_full: bool = not first.forgets
        # Whether hits may end within a block.
        self.is_partial: bool = alignment < first.block_size
        # A drafter needs this many tokens after a hit to be cached, too: they are found and dropped.
        self.margin: int = 0
        if drops_hits and not first.is_state:
            self.margin = unit if self.is_partial else first.block_size

    def align(self, num_blocks: int) -> int:
        """Return the largest number of blocks, up to this one, whose end is aligned."""
        while num_blocks * self.first.block_size % self.alignment:
            num_blocks -= 1
        return num_blocks

    def find_from(self, own: list[BlockHash], num_most: int) -> list[list[KVCacheBlock]]:
        """Return the blocks of the first of these hashes, at most `num_most`, that every group has."""
        if len(self.group_ids) == 1:
            return [self.pool.find_cached_prefix(own, num_most, self.group_ids[0])]
        found: list[list[KVCacheBlock]] = [[] for _ in self.group_ids]
        for position in range(num_most):
            if not self.append(found, own[position]):
                break
        return found

    def append(self, found: list[list[KVCacheBlock]], block_hash: BlockHash) -> bool:
        """Append the block of each group. Return False if one of them does not have it."""
        blocks = self.pool.get_cached_block(block_hash, self.group_ids)
        if blocks is None:
            return False
        for index, block in enumerate(blocks):
            found[index].append(block)
        return True


class SlidingWindowGroup(BlockGroup):
    """A token attends to itself and the `window - 1` tokens before it. See `BlockGroup`.

    window 4, block size 4, 9 tokens computed; the next one is token 9
    tokens  0 1 2 3 | 4 5 6 7 | 8 9
    table   null    | block   | block          token 9 attends to 6, 7, 8, 9
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.window: Final[int] = spec.sliding_window
        # The leading tokens of a window plus those before it that a request keeps nevertheless.
        self.num_kept = self.window - 1 + spec.extra_retained_tokens
        self.starts_anywhere = True
        self.forgets = True

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.num_kept)

    def find(
        self, together: EqualGroups, hashes: list[BlockHash], max_num_tokens: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the last consecutive blocks of a window whose end is aligned, or all from the head on."""
        pool = self.pool
        block_size = self.block_size
        num_needed = self.count_hit_blocks(drops)
        own = self.list_hashes(hashes)
        run: list[list[KVCacheBlock]] = []
        end = 0
        shift = 0 if drops else 1
        position = min(max_num_tokens // block_size, len(own)) - 1
        while position >= 0:
            blocks = pool.get_cached_block(own[position], together.group_ids)
            if blocks is None:
                run = []
            elif run or (position + shift) * block_size % together.alignment == 0:
                if not run:
                    end = position + 1
                run.append(blocks)
                if len(run) >= num_needed:
                    break
            position -= 1
        if not run:
            return [[] for _ in together.group_ids], 0
        run.reverse()
        num_blocks = end if len(run) >= num_needed else together.align(end)
        if drops and num_blocks:
            num_blocks = together.align(num_blocks - 1)
        found: list[list[KVCacheBlock]] = []
        for index in range(len(together.group_ids)):
            listed = [pool.null_block] * (end - len(run))
            listed.extend([blocks[index] for blocks in run])
            del listed[num_blocks:]
            found.append(listed)
        return found, num_blocks * block_size

    def count_hit_blocks(self, drops_hits: bool) -> int:
        """Return how many consecutive blocks a hit needs, the dropped one included."""
        return -(-(self.window - 1) // self.block_size) + drops_hits


class ChunkedLocalGroup(BlockGroup):
    """A token attends to the tokens before it in its own chunk. See `BlockGroup`."""

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.chunk_size: Final[int] = spec.attention_chunk_size
        self.num_kept = self.chunk_size
        self.forgets = True

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def find(
        self, together: EqualGroups, hashes: list[BlockHash], max_num_tokens: int, drops: bool
    ) -> tuple[list[list[KVCacheBlock]], int]:
        """Find the blocks of the chunk in which the prefix ends."""
        block_size = self.block_size
        own = self.list_hashes(hashes)
        num_blocks = together.align(min(max_num_tokens // block_size, len(own)))
        while True:
            # A shorter prefix may end in another chunk, which needs other blocks.
            num_passed = self.count_skipped_tokens(num_blocks * block_size) // block_size
            nulls = [self.pool.null_block] * num_passed
            found = together.find_from(own[num_passed:num_blocks], num_blocks - num_passed)
            num_found = num_passed + len(found[0])
            if num_found == num_blocks:
                return [nulls + blocks for blocks in found], num_blocks * block_size
            num_blocks = together.align(num_found)


class CrossAttentionGroup(BlockGroup):
    """Blocks for the encoder's tokens, taken at once and kept until the request ends. See `BlockGroup`."""

    def count_entries(self, step: Step) -> int:
        return self.count_table_blocks(step.num_encoder_tokens)

    def is_quiet(self, table: BlockTable, step: Step, caches: bool) -> bool:
        return True  # a step without encoder tokens


class EncoderOnlyGroup(CrossAttentionGroup):
    """No blocks: everything is computed in one step, and nothing is kept."""

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.reads_whole_sequence = True

    def count_table_blocks(self, num_tokens: int) -> int:
        return 0


class StateGroup(BlockGroup):
    """A token reads the state after the token before it. See `BlockGroup`.

    Attributes:
        num_speculative_blocks: entries at the end of a table, for the states after draft tokens.
    """

    def __init__(self, spec: Any, pool: BlockPoolCore, group_id: GroupId) -> None:
        super().__init__(spec, pool, group_id)
        self.forgets = True
        self.is_state = True
        self.num_speculative_blocks: Final[int] = spec.num_speculative_blocks

    def count_skipped_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 1)


class SingleStateGroup(StateGroup):
    """A state that no request can hit, in one block, and the states after draft tokens."""

    def count_table_blocks(self, num_tokens: int) -> int:
        return super().count_table_blocks(num_tokens) + self.num_speculative_blocks


# ---- the prefix that all groups have ----------------------------------------------------------------


class CachedPrefix(NamedTuple):
    """The result of `get_computed_blocks`: the longest cached prefix of one request.

    Attributes:
        request_id: the request that it was found for.
        blocks: for each group, head first; the null block where none is needed. They are not referenced yet,
            so other requests may take them until `allocate_slots`.
        num_tokens: tokens of the prefix.
        num_evictions: the pool's count at the look-up, to detect that the blocks may be stale.
        junction: with `PrefixRules`, tokens of the longest prefix that a single group has, if the common
            prefix is shorter; 0 otherwise. The other groups cache the end of that prefix.
    """

    request_id: RequestId
    blocks: tuple[list[KVCacheBlock], ...]
    num_tokens: int
    num_evictions: int
    junction: int = 0

    def __repr__(self) -> str:
        counts = ", ".join(str(len(group)) for group in self.blocks)
        return f"<CachedPrefix of request {self.request_id!r}: {self.num_tokens} tokens, {counts} blocks>"


@mypyc_attr(allow_interpreted_subclasses=False)
class PrefixLookup:
    """Finds the longest prefix from which all groups can continue, and junctions of shared prefixes.

    Args:
        parts: of the groups with prefixes. Their order does not matter.
        num_groups: number of the manager's groups, with those that are never hit.
        unit: tokens per hash.
        looks_past_limit: see `RuleDetails`.

    Attributes:
        full: the first groups with full attention; None for none.
    """

    def __init__(self, parts: list[EqualGroups], num_groups: int, unit: int, looks_past_limit: bool) -> None:
        # Full attention first: its blocks need one look-up, and its hits bound those of the others.
        self._parts: list[EqualGroups] = sorted(parts, key=lambda part: not part.is_full)
        self._num_groups: int = num_groups
        self.full: EqualGroups | None = next((part for part in self._parts if part.is_full), None)
        self._unit: int = unit
        self._looks_past_limit: bool = looks_past_limit

    def find_full_block(self, hashes: list[BlockHash], num_tokens: int) -> KVCacheBlock | None:
        """Return the full-attention block with which a cached prefix ends; None if it is not cached."""
        full = self.full
        if full is None:
            return None
        found = full.pool.get_cached_block(hashes[num_tokens // self._unit - 1], full.group_ids[:1])
        return None if found is None else found[0]

    def find(self, hashes: list[BlockHash], max_num_tokens: int) -> tuple[list[list[KVCacheBlock]], int, int]:
        """Return the blocks of the prefix by group, its tokens, and the junction; 0 for none.

        The junction is the longest prefix of a single group, if the common prefix is shorter: the groups
        without it should cache it, since requests share it.
        """
        parts = self._parts
        if not parts or max_num_tokens <= 0:
            return [[] for _ in range(self._num_groups)], 0, 0
        if self._num_groups == 1:
            part = parts[0]
            blocks, num_tokens = part.first.find(part, hashes, max_num_tokens, part.drops_hits)
            return blocks, num_tokens, 0
        return self._find_common(hashes, max_num_tokens)

    def _find_common(
        self, hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], int, int]:
        """Shorten the prefix group by group until all groups have it; see `find`."""
        parts = self._parts
        found: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        num_tokens = max_num_tokens
        num_most = self._find_most(hashes, max_num_tokens)
        num_longest = 0
        num_full: list[int] = [-1] * len(parts)
        has_dropped = [False] * len(parts)
        while True:
            num_current = num_tokens
            for index, part in enumerate(parts):
                if part.is_full and num_full[index] >= 0:
                    num_current = min(num_current, num_full[index])
                    continue
                drops = part.drops_hits and not has_dropped[index]
                limit = min(num_current + part.margin, num_most) if drops else num_current
                blocks, num_found = part.first.find(part, hashes, limit, drops)
                if drops:
                    has_dropped[index] = True
                elif num_found < num_current:
                    has_dropped = [False] * len(parts)
                num_current = num_found
                for group_id, listed in zip(part.group_ids, blocks):  # noqa: B905 (compiles to a loop)
                    found[group_id] = listed
                if part.is_full:
                    num_full[index] = num_found
                num_longest = max(num_longest, num_current)
            if num_current >= num_tokens:
                break
            num_tokens = num_current
            if len(parts) == 2 and parts[0].is_full:
                break
        for part in parts:
            if part.is_full:
                num_blocks = -(-num_tokens // part.first.block_size)
                for group_id in part.group_ids:
                    del found[group_id][num_blocks:]
        return found, num_tokens, num_longest if num_longest > num_tokens else 0

    def _find_most(self, hashes: list[BlockHash], max_num_tokens: int) -> int:
        """Return the most tokens to look up for a hit that drops its last block."""
        return len(hashes) * self._unit if self._looks_past_limit else max_num_tokens

    def find_by_group(
        self, hashes: list[BlockHash], max_num_tokens: int
    ) -> tuple[list[list[KVCacheBlock]], list[int]]:
        """Return the blocks and the tokens of each group's own longest prefix, whatever the others have."""
        found: list[list[KVCacheBlock]] = [[] for _ in range(self._num_groups)]
        lengths = [0] * self._num_groups
        for part in self._parts:
            limit = min(max_num_tokens + part.margin, self._find_most(hashes, max_num_tokens))
            blocks, num_tokens = part.first.find(part, hashes, limit, part.drops_hits)
            for group_id, listed in zip(part.group_ids, blocks, strict=True):
                found[group_id] = listed
                lengths[group_id] = num_tokens
        return found, lengths
