"""Comparisons of cache policies: policies, capacities and traces, beside LRU, the optimum and the ceiling."""
