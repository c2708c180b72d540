"""`merge_traces`: several traces on one clock, each as a tenant; `split_trace`: a trace in several files."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError, describe_known
from kv_pool.lab.trace import Trace, TraceRequest
from kv_pool.lab.trace_writer import MAX_PARTS, choose_unused, open_parts

MAX_HASH_ID = 2**64 - 1
PARTITIONS = ("session", "tenant", "time")
_UNNAMED = "none"

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def name_tenants(traces: Sequence[Trace]) -> list[str]:
    """Return the file names of traces without suffixes, and with a number where two are equal."""
    names: list[str] = []
    for trace in traces:
        stem = trace.path.name
        for suffix in reversed(trace.path.suffixes):
            stem = stem.removesuffix(suffix) or stem
        names.append(choose_unused(stem, names.__contains__))
    return names


def merge_traces(
    traces: Sequence[Trace], tenants: Sequence[str] | None = None, *, shared: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a trace that has the requests of all `traces`, in the order of arrival.

    Each trace keeps its clock and the order of its lines; at equal times the first trace comes first. A line
    keeps all its fields and gets two: `tenant`, and `hash_id_offset`, which was added to its hash ids so that
    no two traces have a common id. Conversations are separate for each tenant. `split_trace` by tenant gives
    back the traces.

    Args:
        tenants: names, one for each trace; None takes the names of the files.
        shared: equal ids of different traces mean equal blocks: leave the ids as they are. Required for
            traces of token ids, which cannot be renumbered.
    Raises:
        InvalidArgumentError: there are no traces, names repeat, block sizes differ, or ids do not fit into
            64 bits.
        TraceError: a trace cannot be read, or is a merged trace already.

    Reads each trace twice, unless they are shared. Memory: one request per trace.
    """
    names = list(name_tenants(traces) if tenants is None else tenants)
    _check_tenants(traces, names, shared)
    offsets = [0] * len(traces) if shared else _find_offsets(traces)
    return _merge(traces, names, offsets)


def _check_tenants(traces: Sequence[Trace], names: list[str], shared: bool) -> None:
    if not traces:
        raise InvalidArgumentError("there are no traces to merge")
    if len(names) != len(traces):
        raise InvalidArgumentError(f"{len(names)} names for {len(traces)} traces")
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"two tenants have the same name: {', '.join(names)}")
    first = traces[0]
    for trace in traces:
        if trace.block_size != first.block_size:
            raise InvalidArgumentError(
                f"{trace.path} has {_describe(trace)}, and {first.path} has {_describe(first)}; merge traces "
                "of one block size"
            )
    if first.block_size is None and not shared:
        raise InvalidArgumentError(
            f"{first.path} has token ids, which cannot be renumbered; pass --shared to merge them as they are"
        )


def _describe(trace: Trace) -> str:
    return "token ids" if trace.block_size is None else f"{trace.block_size} tokens per hash id"


def _find_offsets(traces: Sequence[Trace]) -> list[int]:
    offsets = []
    offset = 0
    for trace in traces:
        highest = max((max(request.hash_ids or (0,)) for request in trace), default=0)
        if offset + highest > MAX_HASH_ID:
            raise InvalidArgumentError(
                f"the hash ids of {trace.path}, up to {highest}, do not fit behind the {offset} ids of the "
                "traces before it into 64 bits; kv-pool trace convert renumbers ids"
            )
        offsets.append(offset)
        offset += highest + 1
    return offsets


def _merge(traces: Sequence[Trace], names: list[str], offsets: list[int]) -> Iterator[dict[str, Any]]:
    streams = [_read(trace, number) for number, trace in enumerate(traces)]
    for _, number, request, text in heapq.merge(*streams, key=lambda item: item[:2]):
        line: dict[str, Any] = _decode(text)
        if "tenant" in line or "hash_id_offset" in line:
            raise TraceError(
                f"{traces[number].path}:{request.line}: the request has a tenant already; split that trace "
                "by tenant, and merge all parts at once"
            )
        if request.hash_ids is not None and offsets[number]:
            offset = offsets[number]
            line["hash_ids"] = [hash_id + offset for hash_id in request.hash_ids]
        line["tenant"] = names[number]
        line["hash_id_offset"] = offsets[number]
        yield line


def _read(trace: Trace, number: int) -> Iterator[tuple[float, int, TraceRequest, bytes]]:
    """Yield requests with times that do not decrease: a late request comes with its predecessor."""
    now_ms = 0.0
    for request, text in trace.read_lines():
        now_ms = max(now_ms, request.arrival_ms)
        yield now_ms, number, request, text


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
    _check_parts(by, num_parts, every_s)
    numbers: dict[str, int] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    with open_parts(pattern) as parts:
        for request, text in trace.read_lines():
            line: object = msgspec.Raw(text.strip())
            if by == "tenant":
                part = _UNNAMED if request.tenant is None else request.tenant
                line = _restore_line(request, text, trace.path)
            elif by == "time":
                part = f"{int(request.arrival_ms / 1000 // (every_s or 1.0)):05}"
            else:
                part = _UNNAMED if request.session_id is None else request.session_id
                if num_parts is not None:
                    part = f"{numbers.setdefault(part, len(numbers)) % num_parts:05}"
            counts[parts.append(part, request.line, parts.encode(line) + b"\n")] += 1
    return counts


def _restore_line(request: TraceRequest, text: bytes, path: Path) -> dict[str, Any]:
    """Return the line from which `merge_traces` made this one. Raises TraceError."""
    line: dict[str, Any] = _decode(text)
    line.pop("tenant", None)
    try:
        offset = msgspec.json.decode(line.pop("hash_id_offset", b"0"), type=int)
        if not 0 <= offset <= min(request.hash_ids or (MAX_HASH_ID,)):
            raise ValueError(f"hash_id_offset is {offset}, which is not in 0 to the lowest hash id")
    except ValueError as error:  # also msgspec's
        raise TraceError(f"{path}:{request.line}: {error}") from error
    if offset:
        line["hash_ids"] = [hash_id - offset for hash_id in request.hash_ids or ()]
    return line


def _check_parts(by: str, num_parts: int | None, every_s: float | None) -> None:
    if by not in PARTITIONS:
        raise InvalidArgumentError(f"cannot split by {by!r}; {describe_known(by, PARTITIONS)}")
    if (num_parts is not None) and by != "session":
        raise InvalidArgumentError("a number of parts is for a split by session")
    if num_parts is not None and not 1 <= num_parts <= MAX_PARTS:
        raise InvalidArgumentError(f"{num_parts} parts are not in 1..{MAX_PARTS}")
    if (every_s is not None) != (by == "time"):
        raise InvalidArgumentError("a split by time, and no other, needs the seconds of a part (--every)")
    if every_s is not None and not 0 < every_s < float("inf"):
        raise InvalidArgumentError(f"a part of {every_s} seconds is not above 0")
