"""`PrefixCache`: look up blocks by prefix, and collect the events about them.

A key is a block hash with its KV cache group. A block has one primary key (on the block itself) and any
number of secondary keys (in `cached_block_hashes_by_block`). The block is found under each of them.
"""

from collections.abc import Sequence
from typing import Any, cast

from mypy_extensions import mypyc_attr

from kv_pool.core.arguments import as_int, as_ints, as_list_of, refuse_type
from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_keys import GROUP_0, group_suffix, is_key
from kv_pool.core.evicting import announce_removed
from kv_pool.core.kv_events import KVCacheEvent
from kv_pool.core.pool_state import NOTHING, PoolState
from kv_pool.ids import BlockHash, BlockHashWithGroupId, GroupId


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache(PoolState):
    """The part of `BlockPool` that finds blocks by prefix."""

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events since the last call, oldest first. The caller may modify the list."""
        if not self.enable_kv_cache_events:
            return []
        if self._unfinished != NOTHING:
            self._recover()
        if self._unannounced:
            announce_removed(self)
        events = self.kv_event_queue
        self.kv_event_queue = []
        return events

    def flush_evicted(self) -> None:
        """Flush evicted blocks that are not yet copied to the lower tiers. No-op without tiers.

        Call this outside the step loop, before moving blocks or overwriting newly allocated ones.
        """
        if self.lower_tiers is not None:
            self.lower_tiers.flush_evicted()

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[GroupId]
    ) -> list[KVCacheBlock] | None:
        """Return the blocks that hold this prefix, one per group in the order of the groups, or None.

        A miss in one group is a miss. If several blocks hold the prefix, the oldest is returned. Changes
        nothing: call `touch()` on the blocks to keep them. O(number of groups).
        Contract: vLLM 0.33 `BlockPool.get_cached_block`.
        """
        if not isinstance(block_hash, bytes):
            refuse_type("block_hash", block_hash, "bytes")
        try:
            cache = self.cached_block_hash_to_block
            entries: dict[Any, Any] = cache._cache
            if self._num_guessable > 0 and len(kv_cache_group_ids) == 1 and cache._num_keys == len(entries):
                # Callers look up a sequence head first: the next lookup is likely for the block that was
                # cached after the last one found.
                next_id = self._last_found._next_cached_id
                if 0 < next_id < self._num_guessable:
                    guess = self.blocks[next_id]
                    suffix = group_suffix(kv_cache_group_ids[0])
                    if guess._next_cached_id >= 0 and is_key(guess.key, block_hash, suffix):
                        self._last_found = guess
                        return [guess]
            found: list[KVCacheBlock] = []
            for group_id in kv_cache_group_ids:
                # An entry is nearly always a bare block. This is a hot path, so skip the method call then.
                key = block_hash + (GROUP_0 if group_id == 0 else group_suffix(group_id))
                block = entries.get(key)
                if not isinstance(block, KVCacheBlock):
                    block = cache.get_one_block(BlockHashWithGroupId(key))
                    if block is None:
                        if self._policy_host is not None:
                            self._policy_host.note_missed(key)
                        return None
                found.append(block)
            if found:
                self._last_found = found[0]
            return found
        except TypeError:
            group_ids = cast("list[GroupId]", as_ints("kv_cache_group_ids", kv_cache_group_ids))
            unchecked: Any = kv_cache_group_ids
            if all(isinstance(group_id, int) for group_id in unchecked):
                raise
            return self.get_cached_block(block_hash, group_ids)  # the ids were NumPy integers

    def find_cached_prefix(
        self,
        block_hashes: Sequence[BlockHash],
        max_num_blocks: int,
        kv_cache_group_id: GroupId = GroupId(0),
    ) -> list[KVCacheBlock]:
        """Return the blocks that hold the longest cached prefix of a sequence, head first.

        Args:
            block_hashes: the sequence's hashes at this group's block size, head first.
            max_num_blocks: the most blocks to return; 0 or less gives [].

        Stops at the first miss. Changes nothing. Replaces one `get_cached_block` call per block.
        O(blocks found + 1).
        """
        if not isinstance(max_num_blocks, int):
            max_num_blocks = as_int("max_num_blocks", max_num_blocks)
        if not isinstance(kv_cache_group_id, int):
            kv_cache_group_id = as_int("kv_cache_group_id", kv_cache_group_id)
        suffix = group_suffix(kv_cache_group_id)
        found: list[KVCacheBlock] = []
        if max_num_blocks <= 0:
            return found
        cache = self.cached_block_hash_to_block
        blocks = self.blocks
        num_guessable = self._num_guessable if cache._num_keys == len(cache._cache) else 0
        next_id = 0
        try:
            for block_hash in block_hashes[:max_num_blocks]:
                if 0 < next_id < num_guessable:
                    guess = blocks[next_id]
                    if guess._next_cached_id >= 0 and is_key(guess.key, block_hash, suffix):
                        found.append(guess)
                        next_id = guess._next_cached_id
                        continue
                key = BlockHashWithGroupId(block_hash + suffix)
                block = cache.get_one_block(key)
                if block is None:
                    if self._policy_host is not None:
                        self._policy_host.note_missed(key)
                    break
                found.append(block)
                next_id = block._next_cached_id
        except TypeError:
            as_list_of("block_hashes", block_hashes, bytes)
            raise
        return found

    def list_keys(self, blocks: Sequence[KVCacheBlock]) -> list[BlockHashWithGroupId]:
        """Return all keys of these blocks, the primary key of each block first. O(keys)."""
        secondary = self.cached_block_hashes_by_block
        keys: list[BlockHashWithGroupId] = []
        listed: list[KVCacheBlock] = as_list_of("blocks", blocks, KVCacheBlock)
        for block in listed:
            if block.key is not None:
                keys.append(cast(BlockHashWithGroupId, block.key))
                if secondary:
                    keys.extend(secondary.get(block.block_id, ()))
        return keys
