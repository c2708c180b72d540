"""Numbers about a running pool."""
