"""Generation with Hugging Face transformers from the pool's blocks. Requires the extra `transformers`."""

from kv_pool.integrations.transformers.cache import PagedCache
from kv_pool.integrations.transformers.sequences import PagedSequences, allocate_shards, allocate_storage

__all__ = ["PagedCache", "PagedSequences", "allocate_shards", "allocate_storage"]
