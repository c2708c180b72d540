"""A target with colder tiers: what arrives takes the place of blocks whose content goes on there."""

import pytest
from migration.made_nodes import HASHER, MadeEngine, make_node

from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.migration.subjects import PrefixSubject, SequenceSubject
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tiered_cache import TieredCache

OLD, NEW = list(range(16)), list(range(100, 112))


@pytest.mark.parametrize("subject", ["prefix", "request"])
def test_tiers_get_the_old_bytes_of_blocks_that_a_migration_writes_to(subject):
    source, target = MadeEngine(), MadeEngine(num_blocks=5)
    tiers = TieredCache(target.pool, target.storage, [HostTier(8, target.storage)])
    target.start("old", OLD)
    target.finish("old")
    source.start("new", NEW)
    with make_node("source", source) as there, make_node("target", target) as here:
        here.connect(there)
        if subject == "prefix":
            here.fetch(PrefixSubject(tuple(HASHER.hash_blocks(NEW))), "source").wait(30.0)
        else:
            here.fetch(SequenceSubject("new"), "source", is_move=True).wait(30.0)
    tiers.flush()  # as the next step does
    assert target.check_prefix(NEW) == 3
    keys = [make_block_hash_with_group_id(block_hash, 0) for block_hash in HASHER.hash_blocks(OLD)]
    stored = [position for position, key in enumerate(keys) if key in tiers]
    assert stored == [1, 2, 3]
    for position in stored:
        found = tiers.tiers[0].read([keys[position]])
        content = f"0 {OLD[: (position + 1) * 4]}"
        assert found.storage.read_block(found.block_ids[0]) == target.make_bytes(content)
