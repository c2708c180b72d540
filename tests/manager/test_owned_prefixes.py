"""Adapters that are loaded again, and the eviction of what an adapter, a salt or a session has cached."""

import pytest
from manager.table_drawing import grow

from kv_pool import (
    BlockHasher,
    BlockPool,
    FullAttentionSpec,
    InvalidArgumentError,
    KVCacheManager,
    LoRARequest,
    MambaSpec,
    PrefixRules,
    Request,
    SaltRegion,
)
from kv_pool.core.block_hash import HASH_ALGORITHMS
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

HASHER = BlockHasher("sha256", block_size=4)


def make(num_blocks=40, groups=None, **options):
    return KVCacheManager(BlockPool(num_blocks + 1, True, 4), groups=groups, tracks_owners=True, **options)


def start(manager, name, tokens=range(13), **options):
    request = Request(name, tokens, HASHER, **options)
    prefix = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None
    manager.take_block_copies()
    request.num_computed_tokens = request.num_tokens
    return request


def compute(manager, name, tokens=range(13), **options):
    manager.free(start(manager, name, tokens, **options))


def hits(manager, tokens=range(13), **options):
    return manager.get_computed_blocks(Request("look-up", tokens, HASHER, **options)).num_tokens


@pytest.mark.parametrize("algorithm", HASH_ALGORITHMS)
def test_an_adapter_that_is_loaded_again_has_other_hashes(algorithm):
    """The second load of an adapter, with other weights, hit the blocks of the first."""
    hasher = BlockHasher(algorithm, "s", 4)

    def hashes(*adapter):
        return Request("r", range(9), hasher, lora_request=LoRARequest(*adapter)).block_hashes

    first = hashes(1, "sql", "/sql")
    assert hashes(1, "sql", "/sql") == first
    # vLLM's hashes do not cover the id.
    assert (hashes(2, "sql", "/sql") == first) == (algorithm == "sha256_cbor")
    assert not set(hashes(1, "sql", "/sql", "v2")) & set(first)
    assert not set(hashes(1, "sql", "/sql", "v2")) & set(hashes(1, "sql", "/sql", "v3"))
    assert hashes(1, "sql", "/sql", "v2") == hashes(5, "sql", "/sql", "v2")  # the same weights elsewhere


def leave(manager, request):
    """Take the request's blocks away, as an aborted plan and a migration do."""
    [table] = manager.pop_tables(request.request_id)
    manager.free_blocks(table.blocks)
    manager.forget_tables(request.request_id)


def test_requests_that_leave_are_not_remembered_for_ever():
    """They were, with all their tokens, until their id was used again."""
    manager = make()
    parent = start(manager, "parent", session_id="chat")
    manager.evict_owned(session_id="chat")
    child = Request("child", range(13), HASHER)
    child.num_computed_tokens = 13
    manager.fork(parent, child)
    leave(manager, child)
    for number in range(200):
        leave(manager, start(manager, f"r{number}", [number] * 4, cache_salt="s"))
    assert len(manager._owners._running) <= 64
    assert manager.caching.uncached == {"parent"}
    assert manager.evict_owned(cache_salt="s") == 36


def test_an_id_that_left_after_an_eviction_caches_again():
    manager = make()
    request = start(manager, "a", cache_salt="s")
    manager.evict_owned(cache_salt="s")
    leave(manager, request)
    compute(manager, "a", cache_salt="s")
    assert hits(manager, cache_salt="s") == 12


def test_running_requests_of_an_evicted_owner_cache_no_more():
    manager = make()
    sql = LoRARequest(1, "sql", "/sql")
    running = start(manager, "a", lora_request=sql)
    child = Request("child", range(13), HASHER, lora_request=sql)
    child.num_computed_tokens = 13
    assert manager.evict_owned(adapter="sql") == 3
    manager.fork(running, child)
    for request in (running, child):
        assert grow(manager, request, range(13, 18))
    manager.take_block_copies()
    assert hits(manager, range(18), lora_request=sql) == 0
    manager.free(running)
    manager.free(child)
    compute(manager, "a", lora_request=sql)  # the id again, with the new weights
    assert hits(manager, lora_request=sql) == 12


def test_a_session_and_a_salt_are_evicted():
    manager = make()
    compute(manager, "a", session_id="chat 1")
    compute(manager, "b", range(50, 63), session_id="chat 2", cache_salt="tenant")
    assert manager.evict_owned(session_id="chat 2", cache_salt="other") == 0
    assert manager.evict_owned(session_id="chat 1") == 3
    assert manager.evict_owned(cache_salt="tenant", session_id="chat 2") == 3
    assert (hits(manager), hits(manager, range(50, 63), cache_salt="tenant")) == (0, 0)


def test_the_public_blocks_before_a_salt_region_stay():
    manager = make()
    regions = [SaltRegion(6, "tenant")]
    compute(manager, "a", salt_regions=regions)
    assert manager.evict_owned(cache_salt="tenant") == 2
    assert hits(manager, salt_regions=regions) == 4


@pytest.mark.parametrize("rules", [None, PrefixRules(retention_interval=None)])
def test_the_blocks_of_all_groups_are_evicted(rules):
    manager = make(groups=[FullAttentionSpec(block_size=4), MambaSpec(block_size=4)], prefix_rules=rules)
    compute(manager, "a", range(12), cache_salt="tenant")
    assert hits(manager, range(14), cache_salt="tenant") == 12
    assert manager.evict_owned(cache_salt="tenant") == 4
    assert hits(manager, range(14), cache_salt="tenant") == 0


def test_lower_tiers_forget_the_owner_too():
    manager = make(3)
    tiers = TieredCache(manager.block_pool, None, [Tier(9, "CPU")])
    compute(manager, "a", range(12), cache_salt="tenant")
    compute(manager, "b", range(50, 62))
    assert len(tiers.tiers[0]) == 3
    assert manager.evict_owned(cache_salt="tenant") == 0
    assert len(tiers.tiers[0]) == 0


def test_owners_are_remembered_only_as_long_as_a_block_is_cached():
    manager = make(20)
    for number in range(2_000):
        compute(manager, f"r{number}", range(number, number + 13), session_id=f"chat {number}")
    assert len(manager._owners._ended) < 600
    assert manager.evict_owned(session_id="chat 1999") == 3


def test_the_call_needs_an_owner_and_a_manager_that_tracks_them():
    with pytest.raises(InvalidArgumentError, match="name an adapter"):
        make().evict_owned()
    with pytest.raises(InvalidArgumentError, match="tracks_owners=True"):
        KVCacheManager(BlockPool(9, True, 4)).evict_owned(adapter="sql")
