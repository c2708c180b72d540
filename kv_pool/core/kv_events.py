"""KV cache events. Applied in order, they rebuild the pool's prefix map.

Encoded with `msgspec.msgpack`, they equal the events of vLLM 0.33 byte for byte: a map keyed by field name
with the class name under `type`, defaults left out. Not compiled: mypyc would drop the struct options.
"""

from typing import Any, NamedTuple

import msgspec

from kv_pool.ids import ExternalBlockHash, GroupId

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU"
MEDIUM_STORAGE = "STORAGE"


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base class of the events. Mutable, because the manager fills in fields that the pool does not know."""


class BlockStored(KVCacheEvent):
    """Blocks of one request in one group were cached.

    Attributes:
        block_hashes: one per stored block, head first; each is the parent of the next.
        parent_block_hash: hash of the block before the first one, None at the start of a sequence.
        token_ids: tokens of the whole span, those of skipped null or masked blocks included.
        block_size: tokens per hash.
        lora_id, lora_name: the adapter, None without one. Readers key on the name.
        medium: where the blocks are: GPU, CPU or STORAGE.
        extra_keys: per hash, the extra keys that it covers (untagged), or None.
        group_idx: KV cache group. The manager adds `kv_cache_spec_kind` and, for windows,
            `kv_cache_spec_sliding_window` (tokens).
        locality, ownership: set by offloading tiers only.
        session_id: session of the request that caused the event.
        lookahead_token_ids: per hash, the tokens after its block that it also covers.
    """

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: GroupId | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class BlockReported(BlockStored, tag="BlockStored"):
    """Blocks that were already cached were hit by a request. Encoded as a `BlockStored`."""


class BlockRemoved(KVCacheEvent):
    """A block was evicted and no longer carries this hash. Another copy may still be hit (as in vLLM)."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: GroupId | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache was reset: no block carries a hash."""


class KVEventTypes(NamedTuple):
    """The event classes of a pool. An engine that checks for its own classes passes them here.

    `stored` and `reported` are called with the fields of `BlockStored` by name, `removed` with the first
    three of `BlockRemoved` by position, `cleared` without arguments. `removed` and `cleared` are classes, the
    others may be functions. If `reported` is None, hits are reported with `stored`, and readers cannot tell
    them from newly cached blocks.
    """

    stored: Any = BlockStored
    removed: Any = BlockRemoved
    cleared: Any = AllBlocksCleared
    reported: Any = None


KV_EVENT_TYPES = KVEventTypes(reported=BlockReported)
