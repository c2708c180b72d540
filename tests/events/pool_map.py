"""A pool's prefix map in the form of a mirror's state, which it must equal."""

from kv_pool.core.block_keys import get_block_hash, get_group_id
from kv_pool.events.publisher_blocks import to_wire_hash


def pool_map(pool):
    """Return all keys of the map as (group, medium, hash)."""
    return {
        (get_group_id(key), pool.medium, to_wire_hash(get_block_hash(key)))
        for key in pool.cached_block_hash_to_block._cache
    }
