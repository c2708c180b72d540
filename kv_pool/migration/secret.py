"""The secret that nodes share: a file that only its owner can read."""

import os
import stat
from pathlib import Path

from kv_pool.errors import InvalidArgumentError
from kv_pool.regular_files import open_regular

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_NEW_SECRET_BYTES = 32


def load_secret(path: str | Path) -> bytes:
    """What is in the file, without white space around it: at least 16 bytes, at most 4096.

    Raises:
        InvalidArgumentError: there is no such file, it is too short or too long, belongs to somebody else, or
            others than its owner can read or write it (where files have owners).
    """
    place = Path(path)
    try:
        with open(open_regular(place), "rb") as file:
            _check_owner_only(place, os.fstat(file.fileno()))
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(
            f"{place}: can not read the shared secret: {error.strerror}. Make one with write_secret_file, "
            "and copy it to every node"
        ) from error
    if len(content) > _MAX_SECRET_BYTES:
        raise InvalidArgumentError(f"{place}: a shared secret has at most {_MAX_SECRET_BYTES} bytes")
    secret = content.strip()
    try:
        check_secret(secret)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{place}: {error}") from None
    return secret


def check_secret(secret: bytes) -> None:
    """Raise InvalidArgumentError for a secret of fewer than 16 bytes."""
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidArgumentError(
            f"the shared secret has {len(secret)} bytes; it takes {MIN_SECRET_BYTES} random ones or more"
        )


def write_secret_file(path: str | Path) -> None:
    """Make a file with a new secret, 64 random hex digits, that only its owner can read and write.

    Raises:
        InvalidArgumentError: something is there already, and stays as it is; or it can not be made.
    """
    place = Path(path)
    try:
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(os.urandom(_NEW_SECRET_BYTES).hex().encode() + b"\n")
    except OSError as error:
        raise InvalidArgumentError(
            f"{place}: can not make a file for the shared secret: {error.strerror}"
        ) from error


def _check_owner_only(place: Path, found: os.stat_result) -> None:
    if os.name != "posix":
        return
    if found.st_mode & 0o077:
        raise InvalidArgumentError(
            f"{place}: others than its owner can read or write this file (mode "
            f"{stat.S_IMODE(found.st_mode):o}), so it is no secret: chmod 600 {place}, or make a new one"
        )
    if found.st_uid not in (os.getuid(), 0):
        raise InvalidArgumentError(f"{place} belongs to user {found.st_uid}, who knows this secret")
