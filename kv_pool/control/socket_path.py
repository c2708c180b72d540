"""The path of a user's control socket: find it, and listen there."""

import fcntl
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from kv_pool.errors import ControlError
from kv_pool.ids import NodeName
from kv_pool.regular_files import open_private

_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Longest path that the kernel's address of a Unix socket can hold, without the final null byte."""

_PROBE_S = 1.0
_PAUSE_S = 0.01

_PLAIN, _PREFIX, _SUFFIX = "control.sock", "control-", ".sock"


def get_default_folder() -> Path:
    """Return `$XDG_RUNTIME_DIR/kv_pool`, or else a folder of this user for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kv_pool"
    return Path(tempfile.gettempdir()) / f"kv_pool-{os.getuid()}"


def get_default_path(node: NodeName | None = None) -> Path:
    """Return the default socket of a pool, `control.sock`, or of a node, `control-NAME.sock`."""
    return get_default_folder() / (_PLAIN if node is None else f"{_PREFIX}{node}{_SUFFIX}")


def list_nodes() -> list[NodeName]:
    """Return the names of the nodes that listen at their default sockets now, also busy ones, sorted."""
    names = []
    for path in get_default_folder().glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            if not is_dead(path, _PROBE_S):
                names.append(NodeName(path.name[len(_PREFIX) : -len(_SUFFIX)]))
    return sorted(names)


def is_dead(path: Path, timeout_s: float) -> bool:
    """Return True if no server listens at the socket at `path`. Raises OSError if that remains unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass  # The queue of connections is full: a server listens.
    return False


def remove_dead_sockets(only: Path | None = None) -> None:
    """Remove this user's sockets in the default folder whose servers have been killed; or `only` this one.

    A server holds the lock of its socket until it listens, and is not mistaken for a dead one before that.
    """
    for path in get_default_folder().glob(f"{_PREFIX}*{_SUFFIX}") if only is None else [only]:
        with suppress(OSError, ControlError), lock_socket(path, 0.0):
            _remove_dead(path, _PROBE_S)


def _remove_dead(path: Path, timeout_s: float) -> None:
    """Remove the socket of a dead server. Raises ControlError if anything else is at `path`."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ControlError(
            f"{path} is not a socket and was left unchanged; choose another path with --socket"
        )
    if not is_dead(path, timeout_s):
        raise ControlError(
            f"a pool is served at {path} already; stop its server, or choose another socket with --socket"
        )
    path.unlink(missing_ok=True)


def listen(path: Path, timeout_s: float, backlog: int) -> socket.socket:
    """Return a socket that listens at `path`, to which only this user can connect.

    In the default folder the sockets of killed servers are removed, otherwise that at `path` only.

    Args:
        timeout_s: seconds to wait for the lock, and for an answer of the server at `path`.
    Raises:
        ControlError: a server listens there already, or a file that is not a socket is there, or as
            `make_folder` and `lock_socket`.
        OSError: the system refuses it.
    """
    make_folder(path)
    if path.parent == get_default_folder():
        remove_dead_sockets()
    with ExitStack() as on_failure:
        listener = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with lock_socket(path, timeout_s):
            _remove_dead(path, timeout_s)
            listener.bind(os.fspath(path))
            # Clients cannot connect before listen().
            os.chmod(path, 0o600)
            listener.listen(backlog)
        on_failure.pop_all()
    return listener


def find_path(path: str | Path | None, node: NodeName | None, not_node: NodeName | None = None) -> Path:
    """Return the path of the socket to connect to.

    Without `path` and `node`: the default socket if it exists, else the socket of the only served node.

    Args:
        path: path of the socket.
        node: name of the node to connect to.
        not_node: a node never chosen by default.
    Raises:
        ControlError: both `path` and `node` are given, or neither and several nodes are served, or none but
            `not_node`; also as `resolve_path`.
    """
    if path is not None and node is not None:
        raise ControlError("pass either --socket or --node, not both")
    if path is not None or node is not None:
        return resolve_path(path, node)
    default = resolve_path(None)
    if default.exists():
        return default
    served = list_nodes()
    names = [name for name in served if name != not_node]
    if served and not names:
        raise ControlError(
            f"node {not_node} is the target and the only pool that is served here, and a node cannot migrate "
            "to itself; name another target, or the source with --node"
        )
    if len(names) > 1:
        raise ControlError(f"several pools are served: {', '.join(names)}; choose one with --node")
    return resolve_path(None, names[0]) if names else default


def resolve_path(path: str | Path | None, node: NodeName | None = None) -> Path:
    """Return `path`, or for None the default path, of a node if `node` is given.

    Raises:
        ControlError: the path is too long, or the default folder belongs to another user, who could
            impersonate the pool.
    """
    resolved = get_default_path(node) if path is None else Path(path)
    length = len(os.fsencode(resolved))
    if length > _MAX_PATH_BYTES:
        raise ControlError(
            f"{resolved} has {length} bytes; a socket's path has at most {_MAX_PATH_BYTES}. Choose a "
            f"shorter one with --socket, or one relative to the current folder."
        )
    if path is None and resolved.parent.exists():
        _check_is_ours(resolved.parent)
    return resolved


def make_folder(path: Path) -> None:
    """Create the folder of the socket at `path`, accessible to its owner only, unless it exists.

    Raises:
        ControlError: it cannot be created, or it is the default folder and belongs to another user.
    """
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ControlError(
            f"{path.parent}: cannot create this folder for the control socket: {error.strerror}. Choose "
            f"another with --socket."
        ) from error
    if path.parent == get_default_folder():
        _check_is_ours(path.parent)


@contextmanager
def lock_socket(
    path: Path,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Hold the lock of the socket at `path` within a `with` block.

    Without it, two servers that replace a dead server's socket could remove each other's. The lock is on a
    file beside the socket, `.NAME.lock`, that only this user can open; any user with read access could lock
    the folder itself.

    Args:
        timeout_s: seconds to wait for another process of this user that holds the lock.
        clock, sleep: in seconds.
    Raises:
        ControlError: the file belongs to another user or cannot be created, or the wait timed out.
    """
    place = path.with_name(f".{path.name}.lock")
    deadline_s = clock() + timeout_s
    while (lock := _take_lock(place)) is None:
        if clock() > deadline_s:
            raise ControlError(
                f"{place}: another server of yours holds this lock; stop it, or choose another socket"
            )
        sleep(_PAUSE_S)
    with lock:
        try:
            yield
        finally:
            with suppress(OSError):
                place.unlink()


def _take_lock(place: Path) -> BufferedReader | None:
    """Return the locked file; None if another process holds the lock."""
    try:
        lock = os.fdopen(open_private(os.fspath(place), os.O_RDWR | os.O_CREAT), "rb")
    except OSError as error:
        raise ControlError(
            f"{place}: cannot be locked: {error.strerror}. Remove it, or choose a socket with --socket in "
            "a folder that only you can write to"
        ) from error
    # Held, or removed by its last holder before it was locked here.
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(place.stat(), os.fstat(lock.fileno())):
            return lock
    lock.close()
    return None


def _check_is_ours(folder: Path) -> None:
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise ControlError(
            f"{folder} is not a folder that only you can enter, so another user could impersonate your "
            f"pool. Remove it, or choose another socket with --socket."
        )
