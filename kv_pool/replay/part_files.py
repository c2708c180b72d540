"""`open_parts`: many files that are written at once, and appear when all are complete."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError
from kv_pool.replay.trace_writer import find_obstacle, open_stream

MAX_PARTS = 10_000
"""Maximum number of files."""

_MAX_BUFFERED_BYTES = 64 << 20
_MAX_NAME_CHARS = 80


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

    def append(self, part: str, line: int, data: bytes) -> None:
        """Append bytes to a part. `line` of the input is for the error of too many parts."""
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
            self._flush()

    def get_path(self, part: str) -> str:
        """Return the path of a part that has data."""
        return self._paths[part]

    def _choose_name(self, part: str) -> str:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", part)[:_MAX_NAME_CHARS].lstrip(".") or "_"
        found, number = name, 1
        # Some file systems do not distinguish case.
        while found.lower() in self._names:
            number += 1
            found = f"{name}-{number}"
        self._names.add(found.lower())
        return found

    def _flush(self) -> None:
        for path, data in self._buffered.items():
            written = self.written.setdefault(path, f"{path}.{os.getpid()}.part")
            with open_stream(path, written, append=True) as file:
                file.write(data)
        self._buffered.clear()
        self._num_buffered = 0

    def finish(self) -> None:
        """Give all files their names."""
        self._flush()
        for path, written in self.written.items():
            os.replace(written, path)


@contextmanager
def open_parts(pattern: str) -> Iterator[PartFiles]:
    """Yield the files of a pattern. They get their names in `PartFiles.finish`.

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
    try:
        yield parts
    except OSError as error:
        raise TraceError(f"{pattern}: cannot write the parts: {error.strerror or error}") from error
    finally:
        for written in parts.written.values():
            Path(written).unlink(missing_ok=True)
