"""`open_pool`: an engine's pool from the TOML file that `kv-pool serve --config` takes."""

from collections.abc import Callable
from time import monotonic
from typing import Any

from kv_pool.adapter.gpu_kv_pool import GPUKVPool
from kv_pool.contiguous.defragmenter import Defragmentable, Defragmenter
from kv_pool.control.serve_settings import ServeSettings, read_settings


def open_pool(config: str, **options: Any) -> tuple[GPUKVPool, Defragmenter]:
    """Return the pool that a TOML file describes, and its defragmenter.

        # pool.toml                             pool, defragmenter = open_pool("pool.toml", storage=storage)
        kv_pool_size = 10000                    ...
        kv_block_size = 16                      defragmenter.step()    # between two steps of the engine
        defrag_threshold = 0.2
        defrag_interval = 60

    The same file works for `kv-pool serve --config` and for an engine; this function checks but ignores the
    keys about traces and nodes.

    Args:
        options: arguments of `GPUKVPool`, such as `storage` and `on_moved`; they override the file.
    Raises:
        InvalidArgumentError: as `read_settings`.
    """
    settings = read_settings(config, {})
    pool = make_pool(settings, **options)
    return pool, make_defragmenter(settings, pool)


def make_pool(settings: ServeSettings, **options: Any) -> GPUKVPool:
    """Return a pool with these settings; see `open_pool`."""
    named: dict[str, Any] = {"run_length": settings.run_length, "live_curve": settings.live_curve}
    return GPUKVPool(settings.blocks, settings.block_size, **(named | options))


def make_defragmenter(
    settings: ServeSettings, pool: Defragmentable, clock: Callable[[], float] = monotonic
) -> Defragmenter:
    """Return a defragmenter of `pool` with these settings."""
    return Defragmenter(
        pool,
        threshold=settings.compaction_threshold,
        interval_s=settings.defrag_interval,
        max_moves=settings.defrag_moves,
        max_evictions=settings.max_evictions,
        clock=clock,
    )
