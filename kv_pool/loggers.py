"""`get_logger`: the logger of a package. The library adds no handlers and sets no levels."""

import logging


def get_logger(module: str) -> logging.Logger:
    """Return the logger for a module, by its `__name__`: one for each package directly in `kv_pool`.

    >>> from kv_pool.loggers import get_logger
    >>> get_logger("kv_pool.migration.backends.nixl").name
    'kv_pool.migration'

    The modules for vLLM share a child of the logger that vLLM configures, so that vLLM's log has their
    messages.
    """
    if module.startswith("kv_pool.integrations.vllm"):
        return logging.getLogger("vllm.kv_pool")
    return logging.getLogger(".".join(module.split(".")[:2]))
