"""Rules by which earlier releases of vLLM cache and find blocks, written without importing vLLM."""

from copy import copy
from dataclasses import replace
from typing import Any

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.block_pool import BlockPool
from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import BlockHashWithGroupId, GroupId
from kv_pool.manager.prefix_rules import RuleDetails

RULES_0_32 = RuleDetails(doubles_junctions=False, renews_states=True)
RULES_0_31 = replace(RULES_0_32, looks_past_limit=False, caches_whole_prompts=True, ends_within_blocks=True)
RULES_0_30 = replace(RULES_0_31, own_drafter_only=True, counts_most_states=True)


class PartialBlocksOnly(BlockPool):
    """A pool that refuses to cache a full block as a partial one, as vLLM until 0.31 does."""

    last_feature_only = False

    def cache_partial_block(
        self,
        request: Any,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: GroupId,
        block_size: int,
        replace_existing_hashes: bool = False,
    ) -> BlockHashWithGroupId | None:
        """Add a key for the first tokens of a block; see `BlockPool.cache_partial_block`.

        Raises:
            InvalidArgumentError: the tokens end at a block, or hashes are as long as blocks. Never raised for
                the null block or with `replace_existing_hashes`. Nothing has changed.
        """
        is_partial = block_size > self.hash_block_size and num_tokens % block_size != 0
        if not is_partial and not replace_existing_hashes and not block.is_null:
            raise InvalidArgumentError(
                f"{num_tokens} tokens end at a block of {block_size} tokens, with hashes of "
                f"{self.hash_block_size}; cache full blocks with cache_full_blocks()"
            )
        has_features = (
            self.enable_kv_cache_events and num_tokens > self.hash_block_size and request.mm_features
        )
        if self.last_feature_only and has_features:
            request = copy(request)
            request.mm_features = request.mm_features[-1:]
        return super().cache_partial_block(
            request, block, num_tokens, kv_cache_group_id, block_size, replace_existing_hashes
        )


class LastFeatureOnly(PartialBlocksOnly):
    """A pool whose events of partial blocks name only the last multimodal input, as in vLLM 0.30."""

    last_feature_only = True
