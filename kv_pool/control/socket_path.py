"""Where the control socket of a user is, and who may have made its folder."""

import os
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from kv_pool.errors import ControlError

_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""What the kernel's address of a Unix socket has room for, without the null byte at its end."""

_PROBE_S = 1.0

_PLAIN, _PREFIX, _SUFFIX = "control.sock", "control-", ".sock"


def get_default_folder() -> Path:
    """`$XDG_RUNTIME_DIR/kv_pool`, or a folder of this user's in that for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kv_pool"
    return Path(tempfile.gettempdir()) / f"kv_pool-{os.getuid()}"


def get_default_path(node: str | None = None) -> Path:
    """The default socket of a pool: `control.sock`; of one that is a node: `control-NAME.sock`."""
    return get_default_folder() / (_PLAIN if node is None else f"{_PREFIX}{node}{_SUFFIX}")


def list_nodes() -> list[str]:
    """Names of the nodes that are served at their default sockets now, in order."""
    names = []
    for path in get_default_folder().glob(f"{_PREFIX}*{_SUFFIX}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.settimeout(_PROBE_S)  # a stopped server with a full queue does not accept
            probe.connect(os.fspath(path))
            names.append(path.name[len(_PREFIX) : -len(_SUFFIX)])
    return sorted(names)


def find_path(path: str | Path | None, node: str | None, not_node: str | None = None) -> Path:
    """The socket of the pool that is meant.

    Args:
        path: where it is; or else
        node: which node's it is; or else it is the default one. Where nobody is served there, but one node is
            at its own, it is that one's.
        not_node: not this node's.
    Raises:
        ControlError: both are given, or none and there are several nodes; and as `resolve_path`.
    """
    if path is not None and node is not None:
        raise ControlError("give either --socket or --node, not both")
    if path is not None or node is not None:
        return resolve_path(path, node)
    default = resolve_path(None)
    if default.exists():
        return default
    names = [name for name in list_nodes() if name != not_node]
    if len(names) > 1:
        raise ControlError(f"several pools are served: {', '.join(names)}; say which one with --node")
    return resolve_path(None, names[0]) if names else default


def resolve_path(path: str | Path | None, node: str | None = None) -> Path:
    """The socket's path; for None the default one, of a node if it is named.

    Raises:
        ControlError: there are no Unix sockets here, it is too long for one, or the default folder belongs to
            somebody else, who could listen there in a pool's stead.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "getuid"):
        raise ControlError("a control socket is a Unix socket, and this system has none")
    resolved = get_default_path(node) if path is None else Path(path)
    length = len(os.fsencode(resolved))
    if length > _MAX_PATH_BYTES:
        raise ControlError(
            f"{resolved} has {length} bytes; a socket's path has {_MAX_PATH_BYTES} at most. Name a shorter "
            f"one with --socket, or relative to the current folder."
        )
    if path is None and resolved.parent.exists():
        _check_is_ours(resolved.parent)
    return resolved


def make_folder(path: Path) -> None:
    """Make the socket's folder, open to its owner only. One that is there stays as it is.

    Raises:
        ControlError: it cannot be made, or is the default one and somebody else's.
    """
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ControlError(
            f"{path.parent}: can not make this folder for the control socket: {error.strerror}. Name another "
            f"with --socket."
        ) from error
    if path.parent == get_default_folder():
        _check_is_ours(path.parent)


def _check_is_ours(folder: Path) -> None:
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise ControlError(
            f"{folder} is not a folder that only you can enter, so whoever listens there may not be your "
            f"pool. Remove it, or name another socket with --socket."
        )
