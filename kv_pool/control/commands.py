"""`PoolCommands`: carry out the commands of `messages` on a pool, its node and its tiers."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kv_pool.control import messages
from kv_pool.errors import ControlError
from kv_pool.reports.allocation_monitor import WINDOWS_S, AllocationMonitor
from kv_pool.reports.controlled_pool import ControlledPool
from kv_pool.reports.holds import explain_block, list_holds
from kv_pool.reports.pool_reading import PoolSources, read_pool
from kv_pool.reports.pool_view import read_view

if TYPE_CHECKING:
    from kv_pool.control.live_node import LiveNode

HISTORY_INTERVAL_S = 3
"""Seconds between two states of the pool that the server keeps."""


@dataclass(frozen=True)
class PoolCommands:
    """A served pool with its tiers, publisher and node. `ControlServer` describes most of the arguments.

    Args:
        sources: what readings and views of the pool are made from. They do not need the guard.
    """

    pool: ControlledPool[Any]
    sources: PoolSources
    path: Path
    guard: AbstractContextManager[object]
    why_no_node: str
    node: "LiveNode | None" = None

    @cached_property
    def monitor(self) -> AllocationMonitor:
        """The states of the last 15 minutes."""
        return AllocationMonitor(self.pool, max(WINDOWS_S) // HISTORY_INTERVAL_S)

    def carry_out(self, command: messages.Command) -> msgspec.Struct:
        """Return the result of a command. Blocks; raises what the pool or the node raises."""
        with self.guard if command.place == "pool" else nullcontext():
            match command:
                case messages.StatsCommand():
                    return self.pool.get_statistics()
                case messages.LayoutCommand():
                    return self.pool.get_layout()
                case messages.SequencesCommand():
                    return self.pool.describe_sequences()
                case messages.DefragCommand():
                    return self._defragment(command)
                case messages.HoldsCommand():
                    with self.pool.lock:
                        if command.block_id is None:
                            return list_holds(self.pool.block_pool)
                        return explain_block(self.pool.block_pool, command.block_id)
                case messages.TiersCommand():
                    if self.sources.tiers is None:
                        raise ControlError(
                            f"the pool at {self.path} has no lower tiers; kv-pool serve adds them with "
                            "--host-tier BLOCKS and --disk-tier FOLDER, other engines with "
                            "ControlServer(tiers=)"
                        )
                    return self.sources.tiers()
                case messages.ReadingCommand():
                    return read_pool(self.sources)
                case messages.ViewCommand():
                    return read_view(self.sources, **msgspec.structs.asdict(command))
                case messages.HistoryCommand():
                    return self.monitor.summarize()
                case messages.MigrateCommand():
                    return self._find_node().migrate(**msgspec.structs.asdict(command))
                case messages.MigrationsCommand():
                    return self._find_node().list_migrations(command.migration_id)
                case messages.CancelCommand():
                    return self._find_node().cancel(command.migration_id)
                case _:
                    return self._find_node().list_peers()

    def _defragment(self, command: messages.DefragCommand) -> messages.DefragReport:
        before = self.pool.get_fragmentation_rate()
        started = time.perf_counter()
        moved = self.pool.defragment(**msgspec.structs.asdict(command))
        elapsed_ms = (time.perf_counter() - started) * 1000
        after = self.pool.get_fragmentation_rate()
        return messages.DefragReport(moved, elapsed_ms, before, after, self.pool.run_length)

    def _find_node(self) -> "LiveNode":
        if self.node is None:
            raise ControlError(
                f"the pool at {self.path} is not a node, so migration is not available: {self.why_no_node}"
            )
        return self.node
