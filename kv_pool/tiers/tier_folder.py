"""`TierFolder`: a folder locked by one process, with a description of its blocks."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from kv_pool.errors import LayoutMismatchError, TierError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.regular_files import open_private, open_private_folder
from kv_pool.storage.block_layout import BlockLayout

DESCRIPTION = "tier.json"
LOCK = "lock"
VERSION = 2
"""2: the layout may name model and weights. Folders of version 1 name neither, and are used without."""
_READ_VERSIONS = (1, VERSION)
_DRAFT = DESCRIPTION + ".new"
_MAX_DESCRIPTION_BYTES = 1024 * 1024


class Description(msgspec.Struct, frozen=True):
    """The content of `tier.json`.

    Attributes:
        version: version of the folder's file format.
        layout: the meaning of bytes and hashes.
        format: the name of the block format.
        encoded_bytes: size of an encoded block.
    """

    version: int
    layout: BlockLayout
    format: str
    encoded_bytes: int


class TierFolder:
    """A tier's folder, opened or created, and locked until `close`.

    Only this user can write to the folder and open its files; all of them are regular files with a single
    link. Files left by an earlier, failed attempt to create the folder are replaced.

    Attributes:
        path: the folder's path.
        descriptor: file descriptor of the folder, for opening files in it.

    Raises:
        LayoutMismatchError: its blocks have another layout, format or version. The folder is unchanged.
        TierError: the folder cannot be created, read or written; is in use by another tier; contains other
            files; or is writable by other users.
    """

    def __init__(self, path: Path, description: Description) -> None:
        self.path = path
        self.descriptor = -1
        self._lock = -1
        with ExitStack() as closing:
            closing.callback(self.close)
            try:
                self._open(description)
            except TierError:
                raise
            except OSError as error:
                raise TierError(f"{path} cannot be used as a tier: {error}") from error
            closing.pop_all()

    def close(self) -> None:
        """Unlock the folder."""
        for descriptor in (self._lock, self.descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._lock = self.descriptor = -1

    def _open(self, description: Description) -> None:
        path = self.path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.descriptor = open_private_folder(path)
        names = set(os.listdir(self.descriptor))
        others = sorted(names - {LOCK, _DRAFT})
        if DESCRIPTION not in names and others:
            raise TierError(
                f"{path} is not a tier's folder: it has no {DESCRIPTION}, but {', '.join(others[:5])}. "
                "Use an empty or a new folder"
            )
        self._lock = open_private(LOCK, os.O_RDWR | os.O_CREAT, self.descriptor)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TierError(
                f"{path} is in use by another tier, in this process or another; close that tier, or use "
                "another folder"
            ) from None
        if DESCRIPTION in os.listdir(self.descriptor):
            self._check(description)
        else:
            self._write_description(description)

    def _check(self, description: Description) -> None:
        file = self.path / DESCRIPTION
        with open(open_private(DESCRIPTION, os.O_RDONLY, self.descriptor), "rb") as opened:
            content = opened.read(_MAX_DESCRIPTION_BYTES)
        try:
            found = msgspec.json.decode(content, type=Description)
        except UNDECODABLE as error:
            raise TierError(
                f"{file} does not describe a tier: {error}. Use another folder, or remove this one"
            ) from error
        if found.version not in _READ_VERSIONS:
            raise LayoutMismatchError(
                f"blocks of {self.path} cannot be used here: they were written in format version "
                f"{found.version}; supported versions are {', '.join(map(str, _READ_VERSIONS))}. Use another "
                "folder"
            )
        description.layout.check_same(found.layout, str(self.path))
        for name in ("format", "encoded_bytes"):
            if getattr(found, name) != getattr(description, name):
                raise LayoutMismatchError(
                    f"blocks of {self.path} cannot be used here: {name} is {getattr(description, name)!r} "
                    f"here and {getattr(found, name)!r} there"
                )

    def _write_description(self, description: Description) -> None:
        """Write the description atomically: after a crash it is either complete or absent."""
        content = memoryview(msgspec.json.format(msgspec.json.encode(description)))
        with suppress(FileNotFoundError):
            os.unlink(_DRAFT, dir_fd=self.descriptor)
        try:
            file = open_private(_DRAFT, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.descriptor)
            try:
                while content:
                    content = content[os.write(file, content) :]
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(_DRAFT, DESCRIPTION, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            os.fsync(self.descriptor)
        except OSError:
            with suppress(OSError):
                os.unlink(_DRAFT, dir_fd=self.descriptor)
            raise
