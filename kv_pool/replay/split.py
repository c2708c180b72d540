"""`split_trace`: the requests of a trace in several files: by session, by tenant or by time."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError
from kv_pool.replay.merge import restore_line
from kv_pool.replay.output_file import find_obstacle
from kv_pool.replay.trace import Trace, TraceRequest
from kv_pool.replay.trace_writer import open_stream

PARTITIONS = ("session", "tenant", "time")
MAX_PARTS = 10_000
"""Maximum number of files of one split."""

_MAX_BUFFERED_BYTES = 64 << 20
_MAX_NAME_CHARS = 80
_UNNAMED = "none"


def split_trace(
    trace: Trace, by: str, pattern: str, *, num_parts: int | None = None, every_s: float | None = None
) -> dict[str, int]:
    """Write the requests of a trace to several files. The order of lines is kept.

    By session, each conversation gets a file, or conversations are dealt to `num_parts` files in the order in
    which they start. By tenant, each tenant gets a file, and the changes of `merge_traces` are undone. By
    time, each `every_s` seconds get a file. Requests without session or tenant are in the part `none`.

    Args:
        by: session, tenant or time.
        pattern: path of the files, with `{part}` for the name of a part. Characters of names other than
            letters, digits, dot, hyphen and underscore are replaced by an underscore. The suffix decides the
            compression.
    Returns:
        The number of requests by path, in the order in which the parts start.
    Raises:
        InvalidArgumentError: an argument is invalid, or there would be more than `MAX_PARTS` files.
        TraceError: the trace cannot be read, or a file not written. No file has changed.
    """
    _check(by, pattern, num_parts, every_s)
    numbers: dict[str, int] = {}
    with _open_parts(pattern) as parts:
        for request, text in trace.read_lines():
            line: object = msgspec.Raw(text.strip())
            if by == "tenant":
                part = _UNNAMED if request.tenant is None else request.tenant
                line = restore_line(request, text, trace.path)
            elif by == "time":
                part = f"{int(request.arrival_ms / 1000 // (every_s or 1.0)):05}"
            else:
                part = _UNNAMED if request.session_id is None else request.session_id
                if num_parts is not None:
                    part = f"{numbers.setdefault(part, len(numbers)) % num_parts:05}"
            parts.add(part, request, line)
        return parts.finish()


def _check(by: str, pattern: str, num_parts: int | None, every_s: float | None) -> None:
    if by not in PARTITIONS:
        raise InvalidArgumentError(f"cannot split by {by!r}; known are {', '.join(PARTITIONS)}")
    if "{part}" not in Path(pattern).name:
        raise InvalidArgumentError(f"the file name of {pattern!r} has no {{part}}, such as {{part}}.jsonl")
    if (num_parts is not None) and by != "session":
        raise InvalidArgumentError("a number of parts is for a split by session")
    if num_parts is not None and not 1 <= num_parts <= MAX_PARTS:
        raise InvalidArgumentError(f"{num_parts} parts are not in 1..{MAX_PARTS}")
    if (every_s is not None) != (by == "time"):
        raise InvalidArgumentError("a split by time, and no other, needs the seconds of a part (--every)")
    if every_s is not None and not 0 < every_s < float("inf"):
        raise InvalidArgumentError(f"a part of {every_s} seconds is not above 0")
    obstacle = find_obstacle(pattern.replace("{part}", _UNNAMED))
    if obstacle is not None:
        raise TraceError(f"{pattern}: cannot write the parts: {obstacle}")


class _Parts:
    """The files of a split, under temporary names until all are complete.

    Lines are collected up to `_MAX_BUFFERED_BYTES` and then appended to all files, so that few files are open
    at once. Each time, a compressed file gets a further stream.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._paths: dict[str, str] = {}
        self._names: set[str] = set()
        self._buffered: defaultdict[str, bytearray] = defaultdict(bytearray)
        self._num_buffered = 0
        self._counts: dict[str, int] = {}
        self.written: dict[str, str] = {}
        self._encode = msgspec.json.Encoder().encode

    def add(self, part: str, request: TraceRequest, line: object) -> None:
        """Append a line to a part."""
        path = self._paths.get(part)
        if path is None:
            if len(self._paths) >= MAX_PARTS:
                raise InvalidArgumentError(
                    f"line {request.line} would begin file {MAX_PARTS + 1:,}; use fewer parts (--parts, "
                    "--every)"
                )
            path = self._paths[part] = self._pattern.replace("{part}", self._choose_name(part))
            self._counts[path] = 0
        data = self._encode(line) + b"\n"
        self._buffered[path] += data
        self._counts[path] += 1
        self._num_buffered += len(data)
        if self._num_buffered >= _MAX_BUFFERED_BYTES:
            self._flush()

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

    def finish(self) -> dict[str, int]:
        """Give all files their names."""
        self._flush()
        for path, written in self.written.items():
            os.replace(written, path)
        return self._counts


@contextmanager
def _open_parts(pattern: str) -> Iterator[_Parts]:
    parts = _Parts(pattern)
    try:
        yield parts
    except OSError as error:
        raise TraceError(f"{pattern}: cannot write the parts: {error.strerror or error}") from error
    finally:
        for written in parts.written.values():
            Path(written).unlink(missing_ok=True)
