"""Notifications of lower tiers: before content is lost, and not for invalid content."""

import pytest

from kv_pool import BlockHasher, BlockPool, Request
from kv_pool.contiguous.run_pool import RunBlockPool

HASHER = BlockHasher(block_size=4)


class Listener:
    """Tiers that record their calls, with the keys at that moment."""

    def __init__(self):
        self.told = []

    def on_blocks_cached(self, request, blocks, hashes, num_cached_blocks, block_size, group_id):
        ids = [block.block_id for block in blocks]
        self.told.append(("cached", ids, list(hashes), num_cached_blocks, block_size, group_id))

    def on_blocks_reused(self, blocks):
        self.told.append(("reused", [(block.block_id, block.block_hash) for block in blocks]))

    def on_cache_reset(self):
        self.told.append(("reset",))


def make_pool(kind, num_blocks=8, **options):
    pool = kind(num_blocks, True, 4, **options)
    pool.lower_tiers = Listener()
    return pool


def cache(pool, num_tokens, first=0):
    request = Request("a", range(first, first + num_tokens), HASHER)
    blocks = pool.get_new_blocks(num_tokens // 4)
    pool.cache_full_blocks(request, blocks, 0, len(blocks), 4, 0)
    return request, blocks


@pytest.mark.parametrize("kind", [BlockPool, RunBlockPool])
def test_reused_blocks_are_reported_while_they_have_keys(kind):
    pool = make_pool(kind)
    request, blocks = cache(pool, 12)
    ids, keys = [block.block_id for block in blocks], [block.block_hash for block in blocks]
    assert pool.lower_tiers.told == [("cached", ids, list(request.block_hashes), 0, 4, 0)]
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(7)
    assert sorted(pool.lower_tiers.told[1][1]) == sorted(zip(ids, keys, strict=True))
    assert not any(block.block_hash for block in blocks)


def test_tiers_are_notified_of_a_reset():
    pool = make_pool(BlockPool)
    _, blocks = cache(pool, 12)
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.lower_tiers.told[-1] == ("reset",)


@pytest.mark.parametrize("kind", [BlockPool, RunBlockPool])
def test_a_generation_changes_on_reuse_not_on_touch_or_free(kind):
    pool = kind(8, True, 4)
    _, blocks = cache(pool, 12)
    before = [block.generation for block in blocks]
    pool.touch(blocks)
    pool.free_blocks(blocks)
    pool.free_blocks(blocks)
    pool.touch(blocks)
    assert [block.generation for block in blocks] == before
    pool.free_blocks(blocks)
    pool.get_new_blocks(4)  # the blocks without content
    assert [block.generation for block in blocks] == before
    pool.take_blocks(blocks)
    assert not {*zip(blocks, before, strict=True)} & {(block, block.generation) for block in blocks}
