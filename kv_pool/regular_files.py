"""Open files that another user may have tampered with: regular files only, and never blocking."""

from __future__ import annotations

import errno
import os
import stat
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from kv_pool.errors import InvalidArgumentError

# Absent on Windows, where a path cannot be a named pipe that blocks.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor. Refuse a FIFO or a device without blocking.

    Args:
        flags: as for `os.open`. A new file (O_CREAT) is accessible to its owner only.
        folder: descriptor of the folder that a relative path starts from.
    Raises:
        OSError: as `os.open`, or the file is not a regular file.
    """
    descriptor = os.open(path, flags | _NO_WAIT, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return descriptor


def read_toml(path: str | os.PathLike[str], contents: str) -> dict[str, Any]:
    """Return the keys and tables of a TOML file.

    Args:
        contents: what the file has, for the error message, such as "the settings".
    Raises:
        InvalidArgumentError: the file is not regular, cannot be read, or is not TOML. It names the file.
    """
    try:
        with open(open_regular(path), "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: cannot read {contents}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: this is not TOML: {error}") from error


def open_private(name: str, flags: int, folder: int | None = None) -> int:
    """Open a regular file that only this user can access, and return its descriptor.

    Args:
        name: name of the file in `folder`, or without one its path.
        flags: as for `os.open`.
        folder: descriptor of the folder, from `open_private_folder`.
    Raises:
        OSError: as `open_regular`; or the file is a symbolic link, has another hard link, belongs to another
            user, or is readable or writable by other users.
    """
    try:
        descriptor = open_regular(name, flags | os.O_NOFOLLOW, folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", name) from error
        raise
    num_links = os.fstat(descriptor).st_nlink
    if num_links > 1:
        _refuse(descriptor, name, f"it has {num_links} hard links, and other names may lead to it")
    return check_private(descriptor, name, 0o077, "access", f"chmod 600 {name}")


def open_private_folder(path: Path) -> int:
    """Open a folder that only this user can write to, and return its descriptor.

    Raises:
        OSError: the folder does not exist, is a symbolic link, belongs to another user, or is writable by
            other users.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link; name the folder it points to", path) from error
        raise
    return check_private(descriptor, os.fspath(path), 0o022, "write to", "chmod 700 it")


def check_private(
    descriptor: int, name: str, mode: int, verb: str, way_out: str, trusted: tuple[int, ...] = ()
) -> int:
    """Return the descriptor; close it and raise OSError if another user owns it, or has these rights.

    Args:
        trusted: other users that may own it.
    """
    found = os.fstat(descriptor)
    if found.st_uid not in (os.geteuid(), *trusted):
        _refuse(descriptor, name, f"it belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & mode:
        mode = stat.S_IMODE(found.st_mode)
        _refuse(descriptor, name, f"other users can {verb} it (mode {mode:o}); {way_out}")
    return descriptor


def _refuse(descriptor: int, name: str, reason: str) -> NoReturn:
    os.close(descriptor)
    raise OSError(errno.EPERM, reason, name)


def find_obstacle(path: str) -> str | None:
    """Return why the file `path` cannot be written now, or None. A full disk is found only when writing."""
    try:
        if os.path.isdir(path):
            return "it is a folder"
        if os.path.exists(path):
            return None if os.access(path, os.W_OK) else "writing it is not permitted"
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            return f"there is no folder {folder}"
        os.lstat(folder / (Path(path).name or "."))
    except FileNotFoundError:
        return None if os.access(folder, os.W_OK | os.X_OK) else f"writing to {folder} is not permitted"
    except (OSError, ValueError) as error:  # the name is too long, or contains a null byte
        return getattr(error, "strerror", None) or str(error)
    return "it is a broken symbolic link"
