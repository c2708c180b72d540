"""vLLM with kv_pool's classes instead of its own; `register` is the entry point that vLLM calls."""

from kv_pool.integrations.vllm.plugin import register

__all__ = ["register"]
