"""`PullSettings`: the settings that all pulls of a node share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kv_pool.ids import NodeName
from kv_pool.manager.leases import Lease
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.status import MigrationRecord
from kv_pool.migration.transfer_backend import BlockReader

_Result = TypeVar("_Result")


class Parallel(Protocol):
    """An executor, such as `Workers`."""

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Schedule `work` and return its future."""


@dataclass(frozen=True)
class PullSettings:
    """The settings that all pulls of a node share.

    Attributes:
        name: of the target.
        lease_s: duration of the write lease unless renewed, and time limit of one read.
        clock: monotonic time in seconds, the clock of the site's leases.
        deadline_clock: `time.monotonic`, the clock of the backends' deadlines.
        limit: shared by all migrations to this node.
        on_change: called without any lock, with the record of a pull that has entered a phase or finished a
            batch.
        on_unsettled: called with a lease and a reader that may still write to its blocks.
    """

    name: NodeName
    site: PoolSite
    lease_s: float
    clock: Callable[[], float]
    deadline_clock: Callable[[], float]
    limit: RateLimit
    parallel: Parallel
    on_change: Callable[[MigrationRecord], object]
    on_unsettled: Callable[[Lease, BlockReader], object]
