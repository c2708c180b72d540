"""`open_trace_writer`: writes a trace line by line, compressed as its suffix says."""

import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from kv_pool.errors import TraceError, describe_install
from kv_pool.replay.output_file import find_obstacle

WriteLine = Callable[[object], None]
"""Writes one object as a line of JSON."""


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
