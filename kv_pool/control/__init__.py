"""The control socket of a running pool: its server, its client, and their reports."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_pool.control.client import ControlClient
    from kv_pool.control.controlled_manager import ControlledManager
    from kv_pool.control.controlled_pool import ControlledPool
    from kv_pool.control.live_node import LiveNode
    from kv_pool.control.messages import DefragReport
    from kv_pool.control.serve_settings import ServeSettings, read_settings
    from kv_pool.control.server import ControlServer
    from kv_pool.control.settings_pool import make_defragmenter, make_pool, open_pool
    from kv_pool.errors import ControlError
else:
    from kv_pool.lazy_names import export_lazily

    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "kv_pool.control.client": ("ControlClient",),
            "kv_pool.control.controlled_manager": ("ControlledManager",),
            "kv_pool.control.controlled_pool": ("ControlledPool",),
            "kv_pool.control.live_node": ("LiveNode",),
            "kv_pool.control.messages": ("DefragReport",),
            "kv_pool.control.serve_settings": (
                "ServeSettings",
                "read_settings",
            ),
            "kv_pool.control.server": ("ControlServer",),
            "kv_pool.control.settings_pool": (
                "open_pool",
                "make_pool",
                "make_defragmenter",
            ),
            "kv_pool.errors": ("ControlError",),
        },
    )

__all__ = [
    "ControlServer",
    "ControlClient",
    "ControlledPool",
    "ControlledManager",
    "LiveNode",
    "DefragReport",
    "ServeSettings",
    "read_settings",
    "open_pool",
    "make_pool",
    "make_defragmenter",
    "ControlError",
]
