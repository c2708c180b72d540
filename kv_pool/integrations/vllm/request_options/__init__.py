"""The `kv_pool` objects of requests to vLLM: found, checked in the API server, applied in the engine."""
