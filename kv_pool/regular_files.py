"""Open files that another user may have prepared: regular files only, and without waiting."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Absent on Windows, which has no named pipes to wait for among its files.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor. A FIFO or a device is refused at once, not waited for.

    Args:
        flags: as for `os.open`. A file that is made (O_CREAT) is for its owner only.
        folder: descriptor of the folder that a relative path starts from.
    Raises:
        OSError: as `os.open`, or the file is not a regular one.
    """
    descriptor = os.open(path, flags | _NO_WAIT, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return descriptor


def open_private(name: str, flags: int, folder: int) -> int:
    """Open a regular file that belongs to this user alone, and return its descriptor.

    Args:
        name: of the file, in the folder with this descriptor; see `open_private_folder`.
        flags: as for `os.open`.
    Raises:
        OSError: as `open_regular`; the file is a symbolic link, has another hard link, belongs to another
            user, or others can read or write it.
    """
    try:
        descriptor = open_regular(name, flags | os.O_NOFOLLOW, folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", name) from error
        raise
    found = os.fstat(descriptor)
    reason = ""
    if found.st_nlink > 1:
        reason = f"it has {found.st_nlink} hard links, and other names may lead to it"
    elif found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif found.st_mode & 0o077:
        reason = f"others than its owner can use it (mode {stat.S_IMODE(found.st_mode):o}); chmod 600 {name}"
    if reason:
        os.close(descriptor)
        raise OSError(errno.EPERM, reason, name)
    return descriptor


def open_private_folder(path: Path) -> int:
    """Open a folder in which only this user can make or replace files, and return its descriptor.

    Raises:
        OSError: there is no such folder, it is a symbolic link, belongs to another user, or others can write
            to it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link; name the folder it leads to", path) from error
        raise
    found = os.fstat(descriptor)
    reason = ""
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    elif found.st_mode & 0o022:
        reason = f"others than its owner can write to it (mode {stat.S_IMODE(found.st_mode):o}); chmod 700 it"
    if reason:
        os.close(descriptor)
        raise OSError(errno.EPERM, reason, os.fspath(path))
    return descriptor
