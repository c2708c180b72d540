"""Where the control socket of a user is, and who may have made its folder."""

import os
import socket
import stat
import sys
import tempfile
from pathlib import Path

from kv_pool.errors import ControlError

_MAX_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""What the kernel's address of a Unix socket has room for, without the null byte at its end."""


def get_default_path() -> Path:
    """`$XDG_RUNTIME_DIR/kv_pool/control.sock`, or a folder of this user's in that for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / "kv_pool" / "control.sock"
    return Path(tempfile.gettempdir()) / f"kv_pool-{os.getuid()}" / "control.sock"


def resolve_path(path: str | Path | None) -> Path:
    """The socket's path; the default one for None.

    Raises:
        ControlError: there are no Unix sockets here, it is too long for one, or the default folder belongs to
            somebody else, who could listen there in a pool's stead.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "getuid"):
        raise ControlError("a control socket is a Unix socket, and this system has none")
    resolved = get_default_path() if path is None else Path(path)
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
    if path == get_default_path():
        _check_is_ours(path.parent)


def _check_is_ours(folder: Path) -> None:
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise ControlError(
            f"{folder} is not a folder that only you can enter, so whoever listens there may not be your "
            f"pool. Remove it, or name another socket with --socket."
        )
