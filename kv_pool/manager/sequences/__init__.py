"""Sequences that hold blocks by id: who holds which, what is pinned, and which sequences are evicted."""
