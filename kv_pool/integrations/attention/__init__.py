"""Attention over the pool's blocks; needs torch, and triton on a GPU."""

from kv_pool.integrations.attention.paged_attention import paged_attention

__all__ = ["paged_attention"]
