"""`PoolStatLogger`: vLLM's Prometheus logger with kv_pool's metrics beside vLLM's own. Imports vLLM; see `plugin`.

The pool is in the engine's process, and `/metrics` in that of the API server. vLLM's statistics of a step have no
place for the pool's, so the figures are read from the engine's control socket at each scrape. A step costs nothing
more.
"""

import logging
import os
from collections.abc import Iterator
from functools import cache, wraps
from multiprocessing import active_children, parent_process
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics import loggers
