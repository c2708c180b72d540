"""`TierFolder`: a folder that one process has to itself, and what its blocks mean."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from kv_pool.errors import LayoutMismatchError, TierError
from kv_pool.storage.block_layout import BlockLayout

DESCRIPTION = "tier.json"
LOCK = "lock"
VERSION = 1


class Description(msgspec.Struct, frozen=True):
    """What is in `tier.json`.

    Attributes:
        version: of the files beside it.
        layout: what the blocks mean.
        format: how they are written: the name of a block format.
        encoded_bytes: that each takes.
    """

    version: int
    layout: BlockLayout
    format: str
    encoded_bytes: int


class TierFolder:
    """Opens a tier's folder, or makes one of an empty or missing folder; locks it until `close`.

    Raises:
        LayoutMismatchError: its blocks are of another layout, format or version. It is left as it is.
        TierError: it can not be made, read or written, is in use by another tier, or has other files.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path
        self._lock = -1
        try:
            self._open(description)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TierError):
                raise TierError(f"{path} can not be used as a tier: {error}") from error
            raise

    def close(self) -> None:
        """Let others open it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self, description: Description) -> None:
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        is_new = not (path / DESCRIPTION).exists()
        if is_new:
            others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
            if others:
                raise TierError(
                    f"{path} is not a tier's folder: it has no {DESCRIPTION}, but {', '.join(others[:5])}. "
                    "Name an empty or a new one"
                )
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierError(
                f"{path} is in use by another tier, of this process or another; close that, or name another "
                "folder"
            ) from None
        if is_new and not (path / DESCRIPTION).exists():
            write_file(path / DESCRIPTION, msgspec.json.format(msgspec.json.encode(description)))
        else:
            self._check(description)

    def _check(self, description: Description) -> None:
        file = self.path / DESCRIPTION
        try:
            found = msgspec.json.decode(file.read_bytes(), type=Description)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TierError(f"{file} does not describe a tier: {error}. Name another folder") from error
        description.layout.check_same(found.layout, str(self.path))
        for name in ("version", "format", "encoded_bytes"):
            if getattr(found, name) != getattr(description, name):
                raise LayoutMismatchError(
                    f"blocks of {self.path} can not be used here: {name} is {getattr(description, name)!r} "
                    f"here and {getattr(found, name)!r} there"
                )


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it has all of its content or is not there, even after a crash."""
    temporary = path.with_name(path.name + ".new")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, content)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
