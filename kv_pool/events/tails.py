"""When a removed block is stored again, announce the resident blocks after it again.

```text
announced so far        a b c d stored, b removed      some readers cannot reach c and d any more
b is stored again       c d removed, b c d stored      all readers reach all blocks
```

Dynamo's indexer hides the blocks after a removed block; storing it again does not restore them.
"""

from typing import Any

from kv_pool.core.kv_events import BlockRemoved, KVCacheEvent
from kv_pool.events.chains import is_alike, make_event
from kv_pool.events.place_blocks import PlaceBlocks

MAX_TAIL_BLOCKS = 1024
"""Maximum number of blocks announced again per store; further blocks are not announced again."""


def announce_with_tails(blocks: PlaceBlocks, fresh: list[Any]) -> list[KVCacheEvent]:
    """Return one removal of the blocks after `fresh`, then stores of both; [] if no blocks follow.

    Args:
        blocks: the blocks of one place.
        fresh: hashes that have just become resident, parents first, and are not announced yet.

    Cost: O(blocks announced).
    """
    place = blocks.place
    are_fresh = set(fresh)
    shown: set[Any] = set()
    again: list[Any] = []
    stores: list[KVCacheEvent] = []
    pending = fresh[::-1]
    while pending:
        following = pending.pop()
        run: list[Any] = []
        run_blocks: list[Any] = []
        while following is not None and following not in shown:
            if following not in are_fresh:
                if len(again) == MAX_TAIL_BLOCKS:
                    break
                again.append(following)
            block = blocks.find_block(following)
            shown.add(following)
            run.append(following)
            run_blocks.append(block)
            following = None
            for child in blocks.list_children(block):
                if following is None and is_alike(block, blocks.find_block(child)):
                    following = child
                else:
                    pending.append(child)
        if run:
            stores.append(make_event(place, run, run_blocks))
    if not again:
        return []
    return [BlockRemoved(again, place.medium, place.group_idx, place.locality, place.ownership), *stores]
