"""kv_pool's classes with vLLM's names and vLLM's event classes, for the installed release; see `releases`.

Only `register` causes its import, since it imports vLLM.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import vllm
from vllm import envs
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.metrics.stats import KVCacheEvictionEvent

from kv_pool.core import block_pool
from kv_pool.core.block import COMPILED, KVCacheBlock
from kv_pool.core.free_queue import FreeKVCacheBlockQueue
from kv_pool.core.hash_map import BlockHashToBlockMap
from kv_pool.core.kv_events import MEDIUM_GPU, KVEventTypes
from kv_pool.core.pool_part import BlockObserver
from kv_pool.environment import LIVE_CURVE, POLICY
from kv_pool.ids import GroupId
from kv_pool.integrations.vllm.releases import PartialBlocksOnly, find_release
from kv_pool.integrations.vllm.request_options.options import warn_of_unread_options
from kv_pool.loggers import get_logger
from kv_pool.metrics import residency
from kv_pool.metrics.residency import BlockMetricsState
from kv_pool.version import __version__

logger = get_logger(__name__)

RELEASE = find_release(vllm.__version__)
"""The number of the installed release, such as (0, 33)."""


def make_older_stored(*, lookahead_token_ids: None, **fields: Any) -> BlockStored:
    """Return vLLM's event without the field that 0.33 added, which is None without lookahead."""
    return BlockStored(**fields)


class BlockPool(block_pool.BlockPool):
    """A `kv_pool.BlockPool` with vLLM's event classes, and block hashes as configured in vLLM."""

    event_types = KVEventTypes(
        stored=BlockStored if RELEASE >= (0, 33) else make_older_stored,
        removed=BlockRemoved,
        cleared=AllBlocksCleared,
    )
    reads_options = False
    """Whether the manager over the pool reads the `kv_pool` objects of requests."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: BlockObserver | None = None,
        num_hash_lookahead_tokens: int = 0,
        medium: str = MEDIUM_GPU,
    ) -> None:
        super().__init__(
            num_gpu_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            num_hash_lookahead_tokens,
            medium,
            event_types=self.event_types,
            use_int_block_hashes=envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES,
            policy=(os.environ.get(POLICY) or None) if enable_caching else None,
            live_curve=enable_caching and os.environ.get(LIVE_CURVE) == "1",
        )
        self.blocks = [self.null_block, *self.free_block_queue.get_all_free_blocks()]
        # Log here rather than in `register`: a forked engine process inherits the classes without calling
        # `register`, and messages logged before vLLM has read its logging options are lost.
        logger.info(
            "kv_pool %s (%s) manages %d KV blocks, medium %s%s",
            __version__,
            "compiled" if COMPILED else "plain Python",
            num_gpu_blocks,
            medium,
            "" if self.policy_host is None else f", cache policy {self.policy_host.name}",
        )

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: GroupId,
        block_mask: Sequence[Any] | None = None,
    ) -> None:
        """Cache blocks as `BlockPool` does; warn if the request has options that no manager reads."""
        if not self.reads_options:
            warn_of_unread_options(request)
        super().cache_full_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask
        )

    # A list, as in vLLM, whose callers may slice and compare it. For Python callers only: the compiled core
    # reads the tuple in its own field.
    @property  # type: ignore[override]
    def blocks(self) -> list[KVCacheBlock]:
        return self._listed_blocks

    @blocks.setter
    def blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        self._listed_blocks = list(blocks)


class KVCacheMetricsCollector(residency.KVCacheMetricsCollector):
    """A `kv_pool.KVCacheMetricsCollector` with vLLM's sample class, as the scheduler's statistics require."""

    def __init__(self, sample_rate: float = 0.01) -> None:
        super().__init__(sample_rate, KVCacheEvictionEvent)


class OlderBlockPool(PartialBlocksOnly, BlockPool):
    """A `BlockPool` for vLLM 0.30 and 0.31."""

    last_feature_only = RELEASE < (0, 31)


CLASSES: dict[str, Any] = {
    "BlockPool": BlockPool if RELEASE >= (0, 32) else OlderBlockPool,
    "BlockHashToBlockMap": BlockHashToBlockMap,
    "KVCacheBlock": KVCacheBlock,
    "FreeKVCacheBlockQueue": FreeKVCacheBlockQueue,
    "KVCacheMetricsCollector": KVCacheMetricsCollector,
    "BlockMetricsState": BlockMetricsState,
}
"""The replacements of the classes in `releases.POOL_LEVEL`, by their names."""
