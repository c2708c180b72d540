"""The `kv_pool` object of a request: decoded strictly, applied to a manager, reported back to the client."""
