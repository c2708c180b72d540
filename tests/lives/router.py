"""`Router`: the view of a subscriber to a node's events, compared with the node."""

from collections import Counter

from kv_pool import AllBlocksCleared, BlockRemoved, BlockStored
from kv_pool.core.block_keys import get_block_hash, get_group_id, make_external_block_hash
from kv_pool.core.kv_events import BlockReported


class Router:
    """Counts stores less removals for each medium, group and hash.

    Args:
        blocks: of all prompts, by hash: the hash of the block before, and the tokens of the block.

    Attributes:
        unknown: removals of blocks that were not stored, since the last clear. If two pools are cleared
            together, the second pool's removals follow the first clear.
    """

    def __init__(self, blocks):
        self.blocks = blocks
        self.held = Counter()
        self.unknown = []

    def apply(self, event):
        match event:
            case AllBlocksCleared():
                self.held.clear()
                self.unknown.clear()
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    place = event.medium, event.group_idx, block_hash
                    if self.held[place]:
                        self.held[place] -= 1
                    else:
                        self.unknown.append(event)
                    if not self.held[place]:
                        del self.held[place]
            case BlockReported():
                for block_hash in event.block_hashes:
                    assert self.held[event.medium, event.group_idx, block_hash], f"{event} was not stored"
            case BlockStored():
                self.check_tokens(event)
                self.held.update((event.medium, event.group_idx, one) for one in event.block_hashes)
            case _:
                raise AssertionError(f"{event} is not an event of a pool")

    def check_tokens(self, event):
        """Check the parent and the tokens of an event about a span without gaps."""
        size = event.block_size
        if not size or len(event.token_ids) != size * len(event.block_hashes):
            assert not event.token_ids or len(event.token_ids) > size * len(event.block_hashes)
            return
        parent = event.parent_block_hash
        for position, block_hash in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[position * size : (position + 1) * size])
            assert self.blocks[block_hash] == (parent, tokens), f"{event} has other tokens, or another parent"
            parent = block_hash


def check_router(node):
    """Apply the events since the last call, and compare the router's view with the caches."""
    for event in node.take_events():
        node.router.apply(event)
    assert not node.router.unknown, f"{node.router.unknown} are about blocks that were not stored"
    found = Counter()
    for pool in node.list_pools():
        for block in pool.blocks:
            found.update(name_place(pool.medium, key) for key in pool.list_keys([block]))
    for tier in node.cache.tiers:
        found.update(name_place(tier.medium, key) for key in tier.list_keys())
    if found != node.router.held:
        raise AssertionError(
            f"{node.name}: by its events it lacks {found - node.router.held}, "
            f"and has {node.router.held - found}"
        )


def name_place(medium, key):
    return medium, get_group_id(key), make_external_block_hash(get_block_hash(key))
