"""Subclasses of vLLM's `KVCacheManager` with one small error each, which a comparison must find."""

from vllm.v1.core.kv_cache_manager import KVCacheManager


class OneSlotMore(KVCacheManager):
    """Reserves a slot more than the scheduler asks for."""

    def allocate_slots(self, request, num_new_tokens, *arguments, num_lookahead_tokens=0, **options):
        return super().allocate_slots(
            request, num_new_tokens, *arguments, num_lookahead_tokens=num_lookahead_tokens + 1, **options
        )


class ShorterHits(KVCacheManager):
    """Does not hit the last token that may be hit."""

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        return super().get_computed_blocks(request, request.num_tokens - 2)


class HalfHits(KVCacheManager):
    """Hits half of a prompt at most: a token less may change nothing in a few chats."""

    def get_computed_blocks(self, request, max_cache_hit_length=None):
        return super().get_computed_blocks(request, request.num_tokens // 2)


class OtherFreeOrder(KVCacheManager):
    """Frees a request's blocks from its start, so that they are evicted in another order."""

    def free(self, request):
        blocks = self.pop_blocks_for_free(request)
        self.block_pool.free_blocks(blocks)


class LaterCaching(KVCacheManager):
    """Caches accepted tokens one token late."""

    def cache_blocks(self, request, num_computed_tokens):
        super().cache_blocks(request, num_computed_tokens - 1)


class NoWatermark(KVCacheManager):
    """Ignores the watermark."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **{**options, "watermark": 0.0})


class OtherStatistics(KVCacheManager):
    """Counts a hit token too many."""

    def record_prefix_cache_stats(self, request, num_hits):
        super().record_prefix_cache_stats(request, num_hits + 1)


class PlainEvents(KVCacheManager):
    """Leaves out the kind of the group in events."""

    def take_events(self):
        return self.block_pool.take_events()


class NoSkippedBlocks(KVCacheManager):
    """Keeps the blocks outside a window when a request has finished."""

    def remove_skipped_blocks(self, *arguments, **options):
        pass


class LostBlock(KVCacheManager):
    """Never frees the first block of a request."""

    def free(self, request):
        for blocks in self.coordinator.get_blocks(request.request_id):
            for block in list(blocks)[:1]:
                block.ref_cnt += not block.is_null
        super().free(request)


class RotatedTables(KVCacheManager):
    """Passes the blocks of a new request to the worker in another order."""

    def get_blocks(self, request_id):
        found = super().get_blocks(request_id)
        return type(found)(tuple([*group[1:], *group[:1]] for group in found.blocks))


ALTERED = {
    name: thing
    for name, thing in vars().items()
    if isinstance(thing, type) and issubclass(thing, KVCacheManager) and thing is not KVCacheManager
}
