"""A running pool's control socket, its client, and what they show."""

from kv_pool.control.client import ControlClient
from kv_pool.control.controlled_manager import ControlledManager
from kv_pool.control.controlled_pool import ControlledPool
from kv_pool.control.messages import DefragReport
from kv_pool.control.server import ControlServer

__all__ = ["ControlClient", "ControlServer", "ControlledManager", "ControlledPool", "DefragReport"]
