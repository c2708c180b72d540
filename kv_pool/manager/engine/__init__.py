"""A `KVCacheManager` with the interface of vLLM's, for vLLM's scheduler and its connectors."""
