"""`PullSettings`: what all pulls of a node share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kv_pool.manager.leases import Lease
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.rate_limit import RateLimit
from kv_pool.migration.status import MigrationRecord
from kv_pool.migration.transfer_backend import BlockReader

_Result = TypeVar("_Result")


class Parallel(Protocol):
    """What runs things beside the caller, such as `Workers`."""

    def submit(self, work: Callable[[], _Result]) -> Future[_Result]:
        """Run it soon."""


@dataclass(frozen=True)
class PullSettings:
    """What all pulls of a node share.

    Attributes:
        name: the target's.
        lease_s: for how long room is lent for writing without a sign of life; how long a read may take.
        clock: seconds, never falling; that of the site's leases.
        deadline_clock: `time.monotonic`, by which backends take their deadlines.
        limit: of all migrations to this node together.
        on_change: called with the record of a pull that has entered a phase or finished a batch, without
            any lock.
        on_unsettled: called with a lease and a reader that may yet write into its blocks.
    """

    name: str
    site: PoolSite
    lease_s: float
    clock: Callable[[], float]
    deadline_clock: Callable[[], float]
    limit: RateLimit
    parallel: Parallel
    on_change: Callable[[MigrationRecord], object]
    on_unsettled: Callable[[Lease, BlockReader], object]
