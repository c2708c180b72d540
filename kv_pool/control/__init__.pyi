# What type checkers see of this package, and what it offers: each name is imported when it is first used.

from kv_pool.control.server import ControlServer as ControlServer
from kv_pool.control.client import ControlClient as ControlClient
from kv_pool.reports.controlled_pool import ControlledPool as ControlledPool
from kv_pool.control.controlled_manager import ControlledManager as ControlledManager
from kv_pool.control.live_node import LiveNode as LiveNode
from kv_pool.control.network_port import NetworkPort as NetworkPort
from kv_pool.control.health import HealthReport as HealthReport
from kv_pool.control.messages import DefragReport as DefragReport
from kv_pool.control.serve_settings import ServeSettings as ServeSettings
from kv_pool.control.serve_settings import read_settings as read_settings
from kv_pool.control.serve_settings import open_pool as open_pool
from kv_pool.control.serve_settings import make_pool as make_pool
from kv_pool.control.serve_settings import make_defragmenter as make_defragmenter
from kv_pool.errors import ControlError as ControlError
