"""Writes result files: a check before the work, traces line by line, and many parts at once."""

import gzip
import lzma
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError, describe_install
from kv_pool.regular_files import find_obstacle

WriteLine = Callable[[object], None]
"""Writes one object as a line of JSON."""


MAX_PARTS = 10_000
"""Maximum number of files."""

_MAX_BUFFERED_BYTES = 64 << 20
_MAX_NAME_CHARS = 80


def check_can_write(path: str, what: str = "the report") -> None:
    """Raise TraceError if `what` cannot be written to `path`. Nothing is created."""
    obstacle = find_obstacle(path)
    if obstacle is not None:
        raise TraceError(f"{path}: cannot write {what}: {obstacle}")


def choose_unused(name: str, is_used: Callable[[str], bool]) -> str:
    """Return `name`, or the first of `name`-2, `name`-3 and so on that is not used."""
    found, number = name, 1
    while is_used(found):
        number += 1
        found = f"{name}-{number}"
    return found


@contextmanager
def writing(path: str, what: str) -> Iterator[None]:
    """Raise an OSError of the `with` block as a TraceError: `what` cannot be written to `path`."""
    try:
        yield
    except OSError as error:
        raise TraceError(f"{path}: cannot write {what}: {error.strerror or error}") from error


@contextmanager
def _replacing(path: str, what: str, written: Mapping[str, str]) -> Iterator[None]:
    """Give files their names at the end of the `with` block; after an error, they are deleted.

    Args:
        path, what: for the error message, as in `writing`.
        written: the temporary name of each file, by its name. The block may add others.
    """
    try:
        with writing(path, what):
            yield
            for name, temporary in written.items():
                os.replace(temporary, name)
    finally:
        for temporary in written.values():
            Path(temporary).unlink(missing_ok=True)


@contextmanager
def open_trace_writer(path: str) -> Iterator[WriteLine]:
    """Create a trace file and yield a function that writes one line to it.

    The suffix decides the compression: .gz, .xz, .zst, or none. A regular file gets its name when the `with`
    block ends without an error; until then, and after an error, a file of that name is unchanged. Equal lines
    give equal bytes with one version of the compression library, and without compression always.

    Raises:
        TraceError: the file cannot be written, or .zst needs a package.
    """
    check_can_write(path, "the trace")
    is_device = Path(path).exists() and not Path(path).is_file()
    written = {} if is_device else {path: _name_temporary(path)}
    with _replacing(path, "the trace", written), open_stream(path, written.get(path, path)) as file:
        encode = msgspec.json.Encoder().encode

        def write(line: object) -> None:
            file.write(encode(line) + b"\n")

        yield write


def _name_temporary(path: str) -> str:
    return f"{path}.{os.getpid()}.part"


def import_zstd(path: str | Path, doing: str) -> Any:
    """Return the module that reads and writes .zst. Raises TraceError if it is not installed."""
    try:
        from backports import zstd
    except ImportError as error:
        raise TraceError(f"{path}: {doing} .zst needs backports.zstd: {describe_install('lab')}") from error
    return zstd


@contextmanager
def open_stream(path: str, written: str, *, append: bool = False) -> Iterator[IO[bytes] | Any]:
    """Open the file `written` for writing, compressed as the suffix of `path` says.

    Raises:
        TraceError: .zst needs a package.
        OSError: the file cannot be opened or written.
    """
    suffix = Path(path).suffix
    with open(written, "ab" if append else "wb") as raw:
        packed: Any = nullcontext(raw)
        if suffix == ".gz":
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0)
        elif suffix == ".xz":
            packed = lzma.open(raw, "wb")  # noqa: SIM115, closed below
        elif suffix == ".zst":
            zstd = import_zstd(path, "writing")
            # With a checksum, like the zstd command: a damaged file is noticed.
            packed = zstd.open(raw, "wb", options={zstd.CompressionParameter.checksum_flag: 1})
        with packed as file:
            yield file


class PartFiles:
    """Files under temporary names, until all are complete.

    Data is collected up to `_MAX_BUFFERED_BYTES` and then appended to all files, so that few files are open
    at once. Each time, a compressed file gets a further stream.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._paths: dict[str, str] = {}
        self._names: set[str] = set()
        self._buffered: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._num_buffered = 0
        self.written: dict[str, str] = {}
        self.encode = msgspec.json.Encoder().encode

    def append(self, part: str, line: int, data: bytes) -> str:
        """Append bytes to a part. Return its path.

        Args:
            line: of the input, for the error of too many parts.
        """
        path = self._paths.get(part)
        if path is None:
            if len(self._paths) >= MAX_PARTS:
                raise InvalidArgumentError(
                    f"line {line} would begin file {MAX_PARTS + 1:,}; use fewer parts (--parts, --every)"
                )
            path = self._paths[part] = self._pattern.replace("{part}", self._choose_name(part))
        self._buffered[path] += data
        self._num_buffered += len(data)
        if self._num_buffered >= _MAX_BUFFERED_BYTES:
            self.flush()
        return path

    def _choose_name(self, part: str) -> str:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", part)[:_MAX_NAME_CHARS].lstrip(".") or "_"
        # Some file systems do not distinguish case.
        found = choose_unused(name, lambda one: one.lower() in self._names)
        self._names.add(found.lower())
        return found

    def flush(self) -> None:
        """Write the data that is collected."""
        for path, data in self._buffered.items():
            temporary = self.written.setdefault(path, _name_temporary(path))
            with open_stream(path, temporary, append=True) as file:
                file.write(data)
        self._buffered.clear()
        self._num_buffered = 0


@contextmanager
def open_parts(pattern: str) -> Iterator[PartFiles]:
    """Yield the files of a pattern. They get their names when the `with` block ends without an error.

    Args:
        pattern: path of the files, with `{part}` for the name of a part. Characters of names other than
            letters, digits, dot, hyphen and underscore are replaced by an underscore. The suffix decides the
            compression.
    Raises:
        InvalidArgumentError: the file name has no `{part}`, or there are more than `MAX_PARTS` parts.
        TraceError: a file cannot be written.
    """
    if "{part}" not in Path(pattern).name:
        raise InvalidArgumentError(f"the file name of {pattern!r} has no {{part}}, such as {{part}}.jsonl")
    obstacle = find_obstacle(pattern.replace("{part}", "none"))
    if obstacle is not None:
        raise TraceError(f"{pattern}: cannot write the parts: {obstacle}")
    parts = PartFiles(pattern)
    with _replacing(pattern, "the parts", parts.written):
        yield parts
        parts.flush()
