"""`split_trace`: the requests of a trace in several files: by session, by tenant or by time."""

from collections import defaultdict

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.merge import restore_line
from kv_pool.replay.part_files import MAX_PARTS, open_parts
from kv_pool.replay.trace import Trace

PARTITIONS = ("session", "tenant", "time")
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
        pattern: path of the files, with `{part}` for the name of a part, as in `open_parts`.
    Returns:
        The number of requests by path, in the order in which the parts start.
    Raises:
        InvalidArgumentError: an argument is invalid, or there would be more than `MAX_PARTS` files.
        TraceError: the trace cannot be read, or a file not written. No file has changed.
    """
    _check(by, num_parts, every_s)
    numbers: dict[str, int] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    with open_parts(pattern) as parts:
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
            parts.append(part, request.line, parts.encode(line) + b"\n")
            counts[parts.get_path(part)] += 1
        parts.finish()
    return counts


def _check(by: str, num_parts: int | None, every_s: float | None) -> None:
    if by not in PARTITIONS:
        raise InvalidArgumentError(f"cannot split by {by!r}; known are {', '.join(PARTITIONS)}")
    if (num_parts is not None) and by != "session":
        raise InvalidArgumentError("a number of parts is for a split by session")
    if num_parts is not None and not 1 <= num_parts <= MAX_PARTS:
        raise InvalidArgumentError(f"{num_parts} parts are not in 1..{MAX_PARTS}")
    if (every_s is not None) != (by == "time"):
        raise InvalidArgumentError("a split by time, and no other, needs the seconds of a part (--every)")
    if every_s is not None and not 0 < every_s < float("inf"):
        raise InvalidArgumentError(f"a part of {every_s} seconds is not above 0")
