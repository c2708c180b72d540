"""A target with lower tiers: arriving blocks reuse blocks whose content is offloaded first."""

from contextlib import ExitStack

import pytest
from migration.made_nodes import HASHER, MadeEngine, make_node

from kv_pool import BlockPool, BlockStored, Request
from kv_pool.core.block_keys import make_block_hash_with_group_id, make_external_block_hash
from kv_pool.migration.messages import OfferedBlock, PrefixSubject, SequenceSubject
from kv_pool.migration.site import insert_keys
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

PATIENCE_S = 30.0
OLD, NEW = list(range(16)), list(range(100, 112))


def list_keys(token_ids):
    return [make_block_hash_with_group_id(block_hash, 0) for block_hash in HASHER.hash_blocks(token_ids)]


@pytest.fixture
def make_pair():
    with ExitStack() as stack:

        def make(num_blocks, **options):
            source, target = MadeEngine(), MadeEngine(num_blocks)
            tiers = TieredCache(target.pool, target.storage, [HostTier(8, target.storage)], **options)
            there, here = (
                stack.enter_context(make_node(name, engine))
                for name, engine in (("source", source), ("target", target))
            )
            here.connect(there)
            source.start("new", NEW)
            return here, target, tiers

        yield make


def check_host(tiers, target, token_ids, positions):
    """Check that the host tier has these blocks of a prompt, with their bytes."""
    keys = list_keys(token_ids)
    assert [position for position, key in enumerate(keys) if key in tiers] == positions
    for position in positions:
        found = tiers.tiers[0].read([keys[position]])
        content = f"0 {token_ids[: (position + 1) * 4]}"
        assert found.storage.read_block(found.block_ids[0]) == target.make_bytes(content)


@pytest.mark.parametrize(
    ("subject", "is_move"),
    [(PrefixSubject(tuple(HASHER.hash_blocks(NEW))), False), (SequenceSubject("new"), True)],
)
def test_old_blocks_are_flushed_before_a_migration_writes(make_pair, subject, is_move):
    here, target, tiers = make_pair(5)
    target.start("old", OLD)
    target.finish("old")
    here.fetch(subject, "source").wait(PATIENCE_S)
    tiers.flush()  # as the next step does
    assert target.check_prefix(NEW) == 3
    check_host(tiers, target, OLD, [1, 2, 3])


def test_arriving_blocks_are_written_through_with_parents(make_pair):
    here, target, tiers = make_pair(32, write="through", enable_events=True)
    here.fetch(PrefixSubject(tuple(HASHER.hash_blocks(NEW))), "source").wait(PATIENCE_S)
    tiers.flush()
    check_host(tiers, target, NEW, [0, 1, 2])
    names = [make_external_block_hash(block_hash) for block_hash in HASHER.hash_blocks(NEW)]
    told = [event for event in target.manager.take_events() if event.medium == "CPU"]
    assert [(event.block_hashes, event.parent_block_hash) for event in told] == [
        ([name], parent) for name, parent in zip(names, [None, *names], strict=False)
    ]


def test_tier_events_carry_what_the_source_knows_of_a_block():
    pool = BlockPool(3, True, 4, enable_kv_cache_events=True)
    tiers = TieredCache(pool, None, [Tier(9)], enable_events=True)
    first, second = HASHER.hash_blocks(range(8))
    (block,) = pool.get_new_blocks(1)
    key = make_block_hash_with_group_id(second, 0)
    insert_keys(pool, block, OfferedBlock(7, 0, (key,), 8, first, (4, 5, 6, 7)), lambda group_id: 4)
    pool.free_blocks([block])
    pool.take_events()
    pool.get_new_blocks(2)
    stored = pool.take_events()[0]
    assert stored == BlockStored(
        [make_external_block_hash(second)],
        make_external_block_hash(first),
        [4, 5, 6, 7],
        4,
        None,
        "CPU",
        None,
        extra_keys=[None],
        group_idx=0,
    )
    assert key in tiers


@pytest.mark.parametrize("write", ["back", "through"])
def test_tiers_learn_a_groups_block_size_from_arrivals(write):
    pool = BlockPool(6, True, 4)
    tiers = TieredCache(pool, None, [Tier(9)], write)
    request = Request("a", range(8), HASHER)
    pool.cache_full_blocks(request, blocks := pool.get_new_blocks(1), 0, 1, 8, 1)
    pool.free_blocks(blocks)
    sizes = [4, 8]
    offers = [  # of group 0; of group 1 a full and a partial block
        OfferedBlock(1, 0, (make_block_hash_with_group_id(HASHER.hash_blocks(range(4))[0], 0),), 4),
        OfferedBlock(2, 0, (make_block_hash_with_group_id(HASHER.hash_blocks(range(50, 58))[1], 1),), 8),
        OfferedBlock(3, 0, (make_block_hash_with_group_id(HASHER.hash_blocks(range(90, 94))[0], 1),), 4),
    ]
    for offered in offers:
        (block,) = pool.get_new_blocks(1)
        insert_keys(pool, block, offered, sizes.__getitem__)
        pool.free_blocks([block])
    pool.get_new_blocks(5)
    assert [offered.keys[0] in tiers for offered in offers] == [True, True, False]
