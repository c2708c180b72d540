"""Transports for blocks between nodes; `transfer_backend` has their common contract."""
