"""`ControlClient`: send commands to a running pool over its control socket."""

import os
import socket
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException, IncompleteRead
from pathlib import Path
from typing import TypeVar

from kv_pool.closing import Closing
from kv_pool.control import messages
from kv_pool.control.socket_path import find_path
from kv_pool.errors import ControlError
from kv_pool.ids import BlockId, NodeName, RequestId, SequenceId
from kv_pool.migration.messages import MigrationStatus
from kv_pool.reports.allocation_monitor import PoolHistory
from kv_pool.reports.holds import HoldList
from kv_pool.reports.layout import PoolLayout
from kv_pool.reports.pool_reading import PoolReading
from kv_pool.reports.pool_view import PoolView
from kv_pool.reports.sequences import SequenceList
from kv_pool.reports.statistics import PoolStatistics

_Result = TypeVar("_Result")


class ControlClient(Closing):
    """A connection to the `ControlServer` of a running pool.

        with ControlClient() as client:
            print(client.get_statistics().utilization)

    Args:
        path: path of the socket. None: the socket of `node`, or the default one; see `socket_path.find_path`.
        node: name of the node to connect to.
        not_node: a node never chosen by default, such as the target of a migration.
        timeout_s: seconds to wait for a reply. The pool replies when its engine has released the lock.
    Raises:
        ControlError: no pool is served at that path, or not to this user.

    Every method raises ControlError if the connection breaks, or else the error that the pool raised.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        node: NodeName | None = None,
        not_node: NodeName | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.path = find_path(path, node, not_node)
        self._connection = _UnixConnection(self.path, timeout_s)
        self._connection.connect()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def get_statistics(self) -> PoolStatistics:
        """Return the pool's statistics; see `GPUKVPool.get_statistics`."""
        return self._ask(messages.StatsCommand(), PoolStatistics)

    def get_history(self) -> PoolHistory:
        """Return the use and the rates of the pool in the last 1, 5 and 15 minutes that it was served."""
        return self._ask(messages.HistoryCommand(), PoolHistory)

    def defragment(self, max_moves: int | None = None, max_evictions: int = 0) -> messages.DefragReport:
        """Compact the pool; see `GPUKVPool.defragment`."""
        return self._ask(messages.DefragCommand(max_moves, max_evictions), messages.DefragReport)

    def get_layout(self) -> PoolLayout:
        """Return the state of each block; see `GPUKVPool.get_layout`."""
        return self._ask(messages.LayoutCommand(), PoolLayout)

    def describe_sequences(self) -> SequenceList:
        """Return the sequences, or requests, that have blocks; see `SequenceList` for their order."""
        return self._ask(messages.SequencesCommand(), SequenceList)

    def list_holds(self, block_id: BlockId | None = None) -> HoldList:
        """Return the holds on all blocks, or on one. Raises InvalidBlockError if the block does not exist."""
        return self._ask(messages.HoldsCommand(block_id), HoldList)

    def list_tiers(self) -> messages.TierList:
        """Return what the lower tiers contain, and how many blocks were hit in each."""
        return self._ask(messages.TiersCommand(), messages.TierList)

    def read(self) -> PoolReading:
        """Return the counters and levels of the pool; see `read_pool`."""
        return self._ask(messages.ReadingCommand(), PoolReading)

    def view(self, num_cells: int = 256, num_sequences: int = 20, num_prefixes: int = 10) -> PoolView:
        """Return the reading, a map, and the largest sequences and hottest prefixes; see `read_view`."""
        return self._ask(messages.ViewCommand(num_cells, num_sequences, num_prefixes), PoolView)

    def migrate(
        self,
        sequence_id: SequenceId | RequestId | None,
        target: NodeName | None = None,
        *,
        is_move: bool = True,
        max_bytes_per_s: float = 0.0,
        backend: str = "",
    ) -> MigrationStatus:
        """Start a migration and return its status without waiting for its end; see `LiveNode.migrate`."""
        command = messages.MigrateCommand(target, sequence_id, is_move, max_bytes_per_s, backend)
        return self._ask(command, MigrationStatus)

    def list_migrations(self) -> messages.MigrationList:
        """Return the node's running migrations and the last ones that ended, oldest first."""
        return self._ask(messages.MigrationsCommand(), messages.MigrationList)

    def get_migration(self, migration_id: str) -> MigrationStatus:
        """Return the status of one migration. Raises InvalidArgumentError if the node does not know it."""
        return self._ask(messages.MigrationsCommand(migration_id), messages.MigrationList).migrations[0]

    def cancel_migration(self, migration_id: str) -> MigrationStatus:
        """Cancel a migration, unless it is too late, and return its status."""
        return self._ask(messages.CancelCommand(migration_id), MigrationStatus)

    def list_peers(self) -> messages.PeerList:
        """Return the nodes that the node knows. The node asks each of them for its state."""
        return self._ask(messages.PeersCommand(), messages.PeerList)

    def _ask(self, command: messages.Command, result_type: type[_Result]) -> _Result:
        target, body = messages.encode_command(command)
        try:
            with ExitStack() as on_failure:
                # After Ctrl-C or a timeout, the next answer would be this command's.
                on_failure.callback(self._connection.close)
                with suppress(BrokenPipeError, ConnectionResetError):  # a refusal can be read even so
                    self._connection.request(command.method, target, body)
                response = self._connection.getresponse()
                answer = response.read()
                on_failure.pop_all()
        except TimeoutError as error:
            raise ControlError(
                f"the pool at {self.path} did not answer within {self._connection.timeout} s; "
                "does its engine hold the lock?"
            ) from error
        except (OSError, IncompleteRead) as error:
            raise ControlError(f"the pool at {self.path} closed the connection; was it stopped?") from error
        except HTTPException as error:
            raise messages.make_version_error(error) from error
        return messages.decode_answer(response.status, answer, result_type)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(os.fspath(self._path))
        except OSError as error:
            self.close()
            raise ControlError(describe_failure(self._path, error)) from error


def describe_failure(path: Path, error: OSError) -> str:
    """Return why no pool could be reached at `path`, and what to do."""
    way_out = "Start one with kv-pool serve, or name another socket with --socket."
    if isinstance(error, PermissionError):  # of a folder above, too: nothing else is known of the path
        return f"the pool at {path} is served only to the user that started it. {way_out}"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"no pool is served at {path}: there is no such socket. {way_out}"
    if path.exists() and not path.is_socket():
        kind = "folder" if path.is_dir() else "file"
        return f"no pool is served at {path}: this is a {kind}, not a socket. {way_out}"
    if isinstance(error, ConnectionRefusedError):
        return f"no pool is served at {path}: no server listens on it any more. {way_out}"
    if isinstance(error, BlockingIOError):
        return f"too many clients are connecting to the pool at {path}; try again."
    return f"{path}: cannot connect: {error.strerror or error}"
