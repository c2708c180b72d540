"""`report_invalid_blocks`: evict blocks with bad content and all that was computed from them.

        tokens   0 . . . | . . . . | . . . . | . . . .
        table    good    | bad     | computed from it: evicted, too
                 valid  ->|

Bad content spreads in three ways: a request computes from what its tables have, or had; a block is copied; a
later request hits what an earlier one has left in the cache. The first two are followed block by block. For
the third, the keys of cached blocks say which prefixes continue a bad one; what cannot be proven good is
evicted.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.core.evicting import evict_invalid, find_own_hash
from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidBlockError
from kv_pool.ids import BlockHashWithGroupId, BlockId, RequestId
from kv_pool.manager.block_groups.block_group import BlockGroup
from kv_pool.manager.block_groups.block_table import ALL_TOKENS, BlockTable
from kv_pool.manager.manager_state import ManagerState


@dataclass(frozen=True)
class InvalidBlocksReport:
    """The result of a failed load.

    Attributes:
        num_valid_tokens: for each request that holds or held a bad block, or was computed from one, the
            number of leading tokens from which it can continue in its blocks; the rest is recomputed.
            Requests that are swapped out, or in an open plan, are included. 0: none; free the request
            (`BlockSwapper.drop` if it is swapped out) and admit it again, and its valid blocks are found as a
            prefix.
        evicted_blocks: the bad blocks, and those computed from them; they can no longer be hit.
    """

    num_valid_tokens: dict[RequestId, int]
    evicted_blocks: list[KVCacheBlock]


def report_invalid_blocks(state: ManagerState, block_ids: Collection[BlockId]) -> InvalidBlocksReport:
    """Evict these blocks and all that was computed from them; report what is left of each request.

    A request with full attention continues from the first bad block of any group. A request with windows
    does so if all that its next token attends to is still there; a request with states, or with bad blocks
    of its encoder, never does. Until it is recomputed from there, none of its later content is cached, and
    further reports include it.

    The tables keep their blocks, since the recomputed content goes there. Their `num_cached_blocks`
    decreases, so that it is cached again. A table counts as forked: others may hold a block to be written.

    Raises:
        InvalidBlockError: an id is not one of this pool's, or the null block's. Nothing has changed.
    Cost: O(blocks in tables, cached keys in all tiers), once more for each request through which bad content
        reaches another.
    """
    pool = state.block_pool
    for block_id in block_ids:
        if not 0 < block_id < pool.num_gpu_blocks:
            raise InvalidBlockError(
                f"block {block_id} was reported as invalid; this pool has blocks 1..{pool.num_gpu_blocks - 1}"
            )
    spread = _Spread(state, [pool.blocks[block_id] for block_id in block_ids])
    spread.run()
    pool.is_changing = True
    num_valid_tokens: dict[RequestId, int] = {}
    for holder in spread.holders:
        # Also if an earlier report or eviction has found it: now the request goes back, and writes again. Its
        # windows may have moved on since.
        num_valid = min(holder.num_valid, holder.tables[0].num_valid_tokens)
        if num_valid == ALL_TOKENS:
            continue
        # A swap keeps the windows of the tokens that are computed now, not earlier ones.
        is_away = state._forgets and holder.request_id not in state._tables
        if is_away or not _can_go_on(holder.tables, state._groups, num_valid):
            num_valid = 0
        for table, group in zip(holder.tables, state._groups, strict=True):
            table.num_valid_tokens = num_valid
            table.num_cached_blocks = min(table.num_cached_blocks, holder.num_valid // group.block_size)
            table.is_forked = True
        num_valid_tokens[holder.request_id] = num_valid
        state._has_forks = True
    if pool.lower_tiers is not None:
        keys = spread.list_bad_keys(pool.lower_tiers.list_parents())
        if keys:
            pool.lower_tiers.on_content_invalidated(keys)
    evicted: list[KVCacheBlock] = []
    for one in spread.pools:
        blocks = spread.list_suspect(one)
        evict_invalid(one, blocks, "invalid")
        if one is pool:
            evicted = blocks
    if state.retention is not None and state.retention.is_active:
        state.retention.forget_blocks(evicted)
    pool.is_changing = False
    return InvalidBlocksReport(num_valid_tokens, evicted)


def evict_invalid_blocks(block_pool: BlockPoolCore, block_ids: Sequence[BlockId]) -> None:
    """Evict these blocks, whose content is wrong, from the pool and from its lower tiers, and no others.

    Raises:
        InvalidBlockError, InvalidTypeError: not ids of this pool's blocks. Nothing has changed.
    """
    tiers = block_pool.lower_tiers
    if tiers is not None:
        listed = [block_id for block_id in block_ids if 0 <= block_id < block_pool.num_gpu_blocks]
        keys = block_pool.list_keys([block_pool.blocks[block_id] for block_id in listed])
        if keys and len(listed) == len(block_ids):
            tiers.on_content_invalidated(keys)
    block_pool.evict_blocks(block_ids)


class _Holder:
    """A request with block tables: running, swapped out, or in an open plan or a migration."""

    def __init__(self, request_id: RequestId, tables: list[BlockTable]) -> None:
        self.request_id = request_id
        self.tables = tables
        request = tables[0].request
        self.hashes: list[bytes] = [] if request is None else list(request.block_hashes)
        self.num_valid = ALL_TOKENS


class _Spread:
    """Finds the blocks, requests and keys that bad content has reached. Changes nothing.

    Attributes:
        pools: the device's pool, and the host pools of swappers.
        suspect: blocks with bad content, in the order in which they were found.
    """

    def __init__(self, state: ManagerState, bad: Iterable[KVCacheBlock]) -> None:
        self.pools: list[BlockPoolCore] = [one.block_pool for one in (state, *state.list_hosts())]
        self.holders = [_Holder(*item) for item in (*state._tables.items(), *state.detached_tables.items())]
        self.suspect: dict[KVCacheBlock, None] = dict.fromkeys(bad)
        self._pool = state.block_pool
        self._groups: list[BlockGroup] = state._groups
        self._largest = max(group.block_size for group in self._groups)
        self._has_changed = False
        self._bad_hashes: dict[bytes, int] = {}
        # The hashes of prefixes that are proven good; None if all are.
        self._good: set[bytes] | None = None
        # For each block, the requests that have written it, and the end of their part.
        self._writers: dict[KVCacheBlock, list[tuple[_Holder, int]]] = {}
        for holder in self.holders:
            for group, position, block, _, is_own in self._list_entries(holder):
                if is_own:
                    self._writers.setdefault(block, []).append((holder, (position + 1) * group.block_size))

    def run(self) -> None:
        self._has_changed = True
        while self._has_changed:
            self._has_changed = False
            self._follow_copies()
            self._find_requests()
            self._judge_cached()

    def list_bad_keys(self, in_tiers: Iterable[BlockHashWithGroupId]) -> list[BlockHashWithGroupId]:
        """Return the keys under which pools and tiers may have bad content, of these in tiers."""
        keys = dict.fromkeys(key for pool in self.pools for key in pool.list_keys(self.list_suspect(pool)))
        keys |= dict.fromkeys(key for key in in_tiers if self._may_be_bad(get_block_hash(key)))
        return list(keys)

    def list_suspect(self, pool: BlockPoolCore) -> list[KVCacheBlock]:
        """Return the suspect blocks of this pool."""
        return [block for block in self.suspect if block.owner is pool.block_owner]

    # ---- tables ----------------------------------------------------------------------------------

    def _list_entries(self, holder: _Holder) -> Iterator[tuple[BlockGroup, int, KVCacheBlock, bool, bool]]:
        """Yield the blocks that a request's tables have, or had: group, position, block, two flags.

        The first flag: the block still has the content that it had in the table. The second: the request has
        written it.
        """
        for table, group in zip(holder.tables, self._groups, strict=True):
            now = (0, table.blocks, [block.generation for block in table.blocks])
            for first, blocks, generations in (now, *(table.past or ())):
                for position, (block, generation) in enumerate(zip(blocks, generations, strict=True), first):
                    if not block.is_null:
                        # Or it was evicted, and not reused since.
                        is_there = block.generation == generation or find_own_hash(block) == self._find_hash(
                            holder, group, position
                        )
                        yield group, position, block, is_there, is_there and position >= table.num_hits

    def _find_hash(self, holder: _Holder, group: BlockGroup, position: int) -> bytes:
        """Return the hash of the request's prefix that ends with this entry; b"" for none."""
        place = (position + 1) * group.stride - 1
        return holder.hashes[place] if group.is_cacheable and place < len(holder.hashes) else b""

    def _find_requests(self) -> None:
        """Find requests with suspect blocks; what they have computed from these is suspect, too."""
        for holder in self.holders:
            num_valid = holder.num_valid
            for group, position, block, is_there, _ in self._list_entries(holder):
                if is_there and block in self.suspect:
                    num_valid = min(num_valid, position * group.block_size if group.is_cacheable else 0)
                elif (
                    # From elsewhere: its block is reused now, or was filled without a key.
                    position < holder.tables[group.group_id].num_hits
                    and not (is_there and block.key is not None)
                    and self._may_be_bad(self._find_hash(holder, group, position))
                ):
                    num_valid = min(num_valid, position * group.block_size)
            if num_valid < holder.num_valid:
                holder.num_valid = num_valid
                self._has_changed = True
            if num_valid == ALL_TOKENS:
                continue
            for group, position, block, is_there, _ in self._list_entries(holder):
                end = (position + 1) * group.block_size
                if is_there and group.is_cacheable and end > num_valid and not self._is_proven(block):
                    self._add(block)

    def _may_be_bad(self, block_hash: bytes) -> bool:
        """Return True if the prefix with this hash contains bad content, or cannot be proven not to."""
        return self._good is not None and block_hash != b"" and block_hash not in self._good

    def _is_proven(self, block: KVCacheBlock) -> bool:
        """Return True if a request that is good up to its end has written the block."""
        return any(holder.num_valid >= end for holder, end in self._writers.get(block, ()))

    def _add(self, block: KVCacheBlock) -> None:
        if block not in self.suspect:
            self.suspect[block] = None
            self._has_changed = True

    # ---- copies ----------------------------------------------------------------------------------

    def _follow_copies(self) -> None:
        for pool in self.pools:
            for target, (generation, source, generation_of_source) in pool.origins.copied_from.items():
                is_valid = target.generation == generation and source.generation == generation_of_source
                if is_valid and source in self.suspect:
                    self._add(target)

    # ---- the prefix cache ------------------------------------------------------------------------

    def _judge_cached(self) -> None:
        """Add the cached blocks whose prefix contains bad content, or cannot be proven not to."""
        bad, inside = self._list_bad_hashes()
        if not bad or bad == self._bad_hashes:
            return
        self._bad_hashes = bad
        self._has_changed = True
        self._good = self._lineage.find_good(bad, inside)
        for pool in self.pools:
            for block in pool.blocks:
                if block.key is None or self._is_proven(block):
                    continue
                if any(self._may_be_bad(get_block_hash(key)) for key in pool.list_keys([block])):
                    self._add(block)

    def _list_bad_hashes(self) -> tuple[dict[bytes, int], list[tuple[bytes, int, int]]]:
        """Return the hashes of suspect content, and bad blocks with unknown ones: see `Lineage.find_good`."""
        bad: dict[bytes, int] = {}
        inside: list[tuple[bytes, int, int]] = []
        unit = self._pool.hash_block_size
        for pool in self.pools:
            for block in self.list_suspect(pool):
                for block_hash, num_tokens, start in self._list_hashes(pool, block):
                    bad[block_hash] = num_tokens
                    # Smaller blocks of other groups may end within this one.
                    found = self._lineage.list_inside(block_hash, num_tokens, start, unit)
                    if found is None:
                        before = block.parent[:-4] if block.key is not None and block.parent else b""
                        inside.append((before, start, num_tokens))
                    else:
                        bad.update(found)
            for block, (generation, copies) in pool.origins.continued_by.items():
                if block in self.suspect and block.generation == generation:
                    for start, hashes in copies:
                        if start // unit < len(hashes):
                            bad[hashes[start // unit]] = (start // unit + 1) * unit
        for holder in self.holders:
            index = holder.num_valid // unit
            if index < len(holder.hashes):
                bad[holder.hashes[index]] = (index + 1) * unit
        return bad, inside

    def _list_hashes(self, pool: BlockPoolCore, block: KVCacheBlock) -> Iterator[tuple[bytes, int, int]]:
        """Yield the hashes of a block's content, each with the tokens of its prefix with and without it."""
        unit = pool.hash_block_size
        if block.key is None:
            own_hash = find_own_hash(block)
            if own_hash is not None:
                num_tokens = max(unit, self._lineage.count_tokens(own_hash))
                yield own_hash, num_tokens, max(0, num_tokens - self._largest)
            return
        primary, *others = pool.list_keys([block])
        num_tokens = block.num_key_tokens
        if num_tokens < 1:
            num_tokens = max(unit, self._lineage.count_tokens(get_block_hash(primary)))
        start = self._find_start(primary, num_tokens)
        yield get_block_hash(primary), num_tokens, start
        for key in others:
            yield get_block_hash(key), start + unit, start

    def _find_start(self, key: BlockHashWithGroupId, num_tokens: int) -> int:
        """Return the first token that the content of this key depends on itself."""
        group_id = get_group_id(key)
        if group_id >= len(self._groups):
            return max(0, num_tokens - self._largest)
        group = self._groups[group_id]
        if group.is_state:
            return num_tokens  # only later tokens are computed from the state
        return (num_tokens - 1) // group.block_size * group.block_size

    @cached_property
    def _lineage(self) -> "Lineage":
        """The prefixes that requests, blocks and tiers know, read from them when first needed."""
        lineage = Lineage()
        for holder in self.holders:
            lineage.add_sequence(holder.hashes, self._pool.hash_block_size)
        for pool in self.pools:
            for block, (generation, copies) in pool.origins.continued_by.items():
                for _, hashes in copies if block.generation == generation else ():
                    lineage.add_sequence(hashes, pool.hash_block_size)
            for block in pool.blocks:
                if block.key is not None:
                    for place, key in enumerate(pool.list_keys([block])):
                        self._add_key(lineage, key, block.num_key_tokens, block.parent, is_exact=place == 0)
        if self._pool.lower_tiers is not None:
            for key, (parent, num_tokens) in self._pool.lower_tiers.list_parents().items():
                self._add_key(lineage, key, num_tokens, parent)
        return lineage

    def _add_key(
        self,
        lineage: "Lineage",
        key: BlockHashWithGroupId,
        num_tokens: int,
        parent: bytes | None,
        is_exact: bool = True,
    ) -> None:
        group_id = get_group_id(key)
        if group_id < len(self._groups) and num_tokens > 0:
            block_size = self._groups[group_id].block_size
            start = (num_tokens - 1) // block_size * block_size
            end = num_tokens if is_exact else start + block_size
            if start == 0:
                lineage.add(get_block_hash(key), end, 0, b"", is_exact)
            elif parent:
                lineage.add(get_block_hash(key), end, start, parent[:-4], is_exact)


def _can_go_on(tables: Sequence[BlockTable], groups: Sequence[BlockGroup], num_tokens: int) -> bool:
    """Return True if all that the next token attends to is there, and a slot for it."""
    for table, group in zip(tables, groups, strict=True):
        if not group.is_cacheable:
            continue
        if group.is_state:
            return False
        num_skipped = group.count_skipped_tokens(num_tokens)
        if any(block.is_null for block in table.blocks[num_skipped // group.block_size :]):
            return False
    return True


# ---- prefixes ------------------------------------------------------------------------------------


class Lineage:
    """The hashes that blocks, requests and tiers know, each with the hashes of shorter prefixes.

    tokens   0      4      8      12           a block of 8 tokens knows the hash at its start only; a
    hashes   root <- a <--- b <--- c           request knows all hashes of its sequence
             root <-------- b
    """

    def __init__(self) -> None:
        self._num_tokens: dict[bytes, int] = {}
        # For each hash, shorter prefixes: the number of their tokens, and their hash.
        self._shorter: dict[bytes, list[tuple[int, bytes]]] = {}

    def add(
        self, block_hash: bytes, num_tokens: int, num_shorter: int, shorter: bytes, is_exact: bool = True
    ) -> None:
        """Add that the prefix with this hash begins with a shorter one, of 0 tokens or with a known hash.

        Args:
            is_exact: False if `num_tokens` is only an upper bound.
        """
        if is_exact:
            self._num_tokens[block_hash] = num_tokens
        else:
            self._num_tokens.setdefault(block_hash, num_tokens)
        self._num_tokens.setdefault(shorter, num_shorter)
        self._shorter.setdefault(block_hash, []).append((num_shorter, shorter))

    def add_sequence(self, hashes: Sequence[bytes], unit: int) -> None:
        """Add the hashes of a sequence, one for each `unit` tokens."""
        shorter = b""
        for index, block_hash in enumerate(hashes):
            self.add(block_hash, (index + 1) * unit, index * unit, shorter)
            shorter = block_hash

    def count_tokens(self, block_hash: bytes) -> int:
        """Return the tokens of the prefix with this hash; 0 if neither it nor a longer one is known."""
        return self._num_tokens.get(block_hash, 0)

    def list_inside(
        self, block_hash: bytes, num_tokens: int, start: int, unit: int
    ) -> list[tuple[bytes, int]] | None:
        """Return the hashes of the same sequence that end between token `start` and this hash's end.

        Returns None if one of them is unknown.
        """
        inside: list[tuple[bytes, int]] = []
        while num_tokens - unit > start:
            for num_shorter, shorter in self._shorter.get(block_hash, ()):
                if num_shorter == num_tokens - unit:
                    block_hash, num_tokens = shorter, num_shorter
                    inside.append((shorter, num_shorter))
                    break
            else:
                return None
        return inside

    def find_good(
        self, bad: Mapping[bytes, int], inside: Iterable[tuple[bytes, int, int]] = ()
    ) -> set[bytes]:
        """Return the hashes of prefixes that are proven to contain no bad one. O(hashes).

        Args:
            bad: for each hash whose content is bad, the tokens of its prefix.
            inside: bad blocks in which prefixes of unknown hashes end: the hash before the block (b"" if it
                is unknown, or for the first block), and the tokens before its start and its end.
        """
        ends = sorted(set(bad.values()))
        suspect = set(bad)
        for before, start, end in inside:
            elsewhere = self.find_good({before: start}) if before else ()
            suspect.update(
                block_hash
                for block_hash, num_tokens in self._num_tokens.items()
                if start < num_tokens < end and block_hash not in elsewhere
            )
        good: set[bytes] = set()
        for block_hash in sorted(self._num_tokens, key=self._num_tokens.__getitem__):
            num_tokens = self._num_tokens[block_hash]
            for num_shorter, shorter in (
                self._shorter.get(block_hash, ()) if block_hash not in suspect else ()
            ):
                is_good = num_shorter <= ends[0] and shorter not in suspect
                # And no bad prefix ends between the two.
                if (is_good or shorter in good) and bisect_right(ends, num_shorter) == bisect_left(
                    ends, num_tokens
                ):
                    good.add(block_hash)
                    break
        return good
