"""Writes result files: a check before the work, and `open_trace_writer` for traces, line by line."""

import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from kv_pool.errors import TraceError, describe_install

WriteLine = Callable[[object], None]
"""Writes one object as a line of JSON."""


def check_can_write(path: str) -> None:
    """Raise TraceError if a report cannot be written to `path`. Nothing is created."""
    obstacle = find_obstacle(path)
    if obstacle is not None:
        raise TraceError(f"{path}: cannot write the report: {obstacle}")


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


@contextmanager
def open_trace_writer(path: str) -> Iterator[WriteLine]:
    """Create a trace file and yield a function that writes one line to it.

    The suffix decides the compression: .gz, .xz, .zst, or none. A regular file gets its name when the `with`
    block ends without an error; until then, and after an error, a file of that name is unchanged. Equal lines
    give equal bytes with one version of the compression library, and without compression always.

    Raises:
        TraceError: the file cannot be written, or .zst needs a package.
    """
    obstacle = find_obstacle(path)
    if obstacle is not None:
        raise TraceError(f"{path}: cannot write the trace: {obstacle}")
    is_device = Path(path).exists() and not Path(path).is_file()
    written = path if is_device else f"{path}.{os.getpid()}.part"
    try:
        with open_stream(path, written) as file:
            encode = msgspec.json.Encoder().encode

            def write(line: object) -> None:
                file.write(encode(line) + b"\n")

            yield write
        if not is_device:
            os.replace(written, path)
    except OSError as error:
        raise TraceError(f"{path}: cannot write the trace: {error.strerror or error}") from error
    finally:
        if not is_device:
            Path(written).unlink(missing_ok=True)


@contextmanager
def open_stream(path: str, written: str, *, append: bool = False) -> Iterator[IO[bytes] | Any]:
    """Open the file `written` for writing, compressed as the suffix of `path` says.

    Raises:
        TraceError: .zst needs a package.
        OSError: the file cannot be opened or written.
    """
    suffix = Path(path).suffix
    with open(written, "ab" if append else "wb") as raw:
        if suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                yield packed
        elif suffix == ".xz":
            with lzma.open(raw, "wb") as packed:
                yield packed
        elif suffix == ".zst":
            try:
                from backports import zstd
            except ImportError as error:
                raise TraceError(
                    f"{path}: writing .zst needs backports.zstd: {describe_install('lab')}"
                ) from error
            # With a checksum, like the zstd command: a damaged file is noticed.
            with zstd.open(raw, "wb", options={zstd.CompressionParameter.checksum_flag: 1}) as packed:
                yield packed
        else:
            yield raw
