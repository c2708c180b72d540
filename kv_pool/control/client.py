"""`ControlClient`: asks a running pool over its control socket."""

import os
import socket
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kv_pool.control.messages import (
    CancelCommand,
    Command,
    DefragCommand,
    DefragReport,
    HoldsCommand,
    LayoutCommand,
    MigrateCommand,
    MigrationsCommand,
    PeersCommand,
    SequencesCommand,
    StatsCommand,
    TiersCommand,
    decode_reply,
    encode_command,
)
from kv_pool.control.node_reports import MigrationList, PeerList, TierList
from kv_pool.control.socket_path import find_path
from kv_pool.errors import ControlError
from kv_pool.migration.status import MigrationStatus
from kv_pool.reports.holds import HoldList
from kv_pool.reports.layout import PoolLayout
from kv_pool.reports.sequences import SequenceList
from kv_pool.reports.statistics import PoolStatistics

_Result = TypeVar("_Result")


class ControlClient:
    """Talks to the `ControlServer` of a running pool.

        with ControlClient() as client:
            print(client.get_statistics().utilization)

    Args:
        path: of the socket; None for that of the node, or the default one; see `socket_path.find_path`.
        node: the node whose pool is meant, by its name.
        not_node: where neither is given and one node is served, it is not this one.
        timeout_s: how long to wait for an answer. A pool answers when its engine lets go of it.
    Raises:
        ControlError: no pool is served there, or not to this user.

    Every method raises ControlError where the connection breaks, and otherwise what the pool raised.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        node: str | None = None,
        not_node: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.path = find_path(path, node, not_node)
        self._timeout_s = timeout_s
        self._connect()

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._replies.close()
        self._socket.close()

    def get_statistics(self) -> PoolStatistics:
        """See `GPUKVPool.get_statistics`."""
        return self._ask(StatsCommand(), PoolStatistics)

    def defragment(self, max_moves: int | None = None, max_evictions: int = 0) -> DefragReport:
        """See `GPUKVPool.defragment`."""
        return self._ask(DefragCommand(max_moves, max_evictions), DefragReport)

    def get_layout(self) -> PoolLayout:
        """See `GPUKVPool.get_layout`."""
        return self._ask(LayoutCommand(), PoolLayout)

    def list_sequences(self) -> SequenceList:
        """The sequences, or requests, that hold blocks; see `SequenceList` for their order."""
        return self._ask(SequencesCommand(), SequenceList)

    def list_holds(self, block_id: int | None = None) -> HoldList:
        """The holds on blocks, or on one block. Raises InvalidBlockError where there is no such block."""
        return self._ask(HoldsCommand(block_id), HoldList)

    def list_tiers(self) -> TierList:
        """What the tiers below the pool hold, and what requests have found where."""
        return self._ask(TiersCommand(), TierList)

    def migrate(
        self,
        sequence_id: int | str | None,
        target: str | None = None,
        *,
        is_move: bool = True,
        max_bytes_per_s: float = 0.0,
        backend: str = "",
    ) -> MigrationStatus:
        """See `LiveNode.migrate`; it has begun when this returns."""
        command = MigrateCommand(target, sequence_id, is_move, max_bytes_per_s, backend)
        return self._ask(command, MigrationStatus)

    def list_migrations(self) -> MigrationList:
        """The node's migrations that run, and the last that have ended, oldest first."""
        return self._ask(MigrationsCommand(), MigrationList)

    def get_migration(self, migration_id: str) -> MigrationStatus:
        """One migration, now. Raises InvalidArgumentError where the node does not know it."""
        return self._ask(MigrationsCommand(migration_id), MigrationList).migrations[0]

    def cancel_migration(self, migration_id: str) -> MigrationStatus:
        """Have one given up, if it is not too late: its phase says."""
        return self._ask(CancelCommand(migration_id), MigrationStatus)

    def list_peers(self) -> PeerList:
        """The nodes that the node knows, each of which is asked."""
        return self._ask(PeersCommand(), PeerList)

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(self._timeout_s)
            self._socket.connect(os.fspath(self.path))
        except OSError as error:
            self._socket.close()
            raise ControlError(describe_failure(self.path, error)) from error
        self._replies = self._socket.makefile("rb")
        self._is_waiting = False

    def _ask(self, command: Command, result_type: type[_Result]) -> _Result:
        if self._is_waiting:  # Ctrl-C, or a timeout: the next reply would be that of the last command
            self.close()
            self._connect()
        self._is_waiting = True
        try:
            self._socket.sendall(encode_command(command))
            line = self._replies.readline()
        except TimeoutError as error:
            raise ControlError(
                f"the pool at {self.path} did not answer within {self._timeout_s} s; does its engine hold it?"
            ) from error
        except OSError as error:
            raise ControlError(f"the pool at {self.path} hung up: {error.strerror}") from error
        if not line.endswith(b"\n"):
            raise ControlError(f"the pool at {self.path} hung up; was it stopped?")
        self._is_waiting = False
        return decode_reply(line, result_type)


def describe_failure(path: Path, error: OSError) -> str:
    """Why nobody could be reached there, and what to do."""
    way_out = "Start one with kv-pool serve, or name another socket with --socket."
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"no pool is served at {path}: there is no such socket. {way_out}"
    if path.is_dir():
        return f"no pool is served at {path}: this is a folder, not a socket. {way_out}"
    if isinstance(error, ConnectionRefusedError) and path.exists() and not path.is_socket():
        return f"no pool is served at {path}: this is a file, not a socket. {way_out}"
    if isinstance(error, ConnectionRefusedError):
        return f"no pool is served at {path}: nobody listens there any more. {way_out}"
    if isinstance(error, PermissionError):
        return f"the pool at {path} is served to the user who started it, and nobody else. {way_out}"
    if isinstance(error, BlockingIOError):
        return f"too many clients are connecting to the pool at {path}; try again."
    return f"{path}: can not connect: {error.strerror or error}"
