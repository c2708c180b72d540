"""`BlockPool` for earlier releases of vLLM, each with what differs from the next. See `releases`.

Their constructors have the options of the newest release; vLLM passes options by name.
"""

from typing import Any

from vllm.distributed.kv_events import BlockStored

from kv_pool.integrations.vllm import pool_classes
from kv_pool.integrations.vllm.older_behaviour import LastFeatureOnly, PartialBlocksOnly


def make_stored(*, lookahead_token_ids: None, **fields: Any) -> BlockStored:
    """Return vLLM's event without the field that 0.33 added, which is None without lookahead."""
    return BlockStored(**fields)


class BlockPool032(pool_classes.BlockPool):
    """A `pool_classes.BlockPool` for vLLM 0.32, which has no lookahead in events."""

    event_types = pool_classes.EVENT_TYPES._replace(stored=make_stored)


class BlockPool031(PartialBlocksOnly, BlockPool032):
    """A `BlockPool032` that refuses full blocks in `cache_partial_block`."""


class BlockPool030(LastFeatureOnly, BlockPool031):
    """A `BlockPool031` whose events of partial blocks name only the last multimodal input."""
