"""Metrics of a running pool: block residency and call latency."""
