"""kv-cache-tester's traces: one JSON document per session.

Source: callanjfox/kv-cache-tester, docs/trace_replay_tester.md at commit 19c263b, and traces/trace_0003.json
at 83eca8e. AIPerf and Dynamo call the format Weka traces; Dynamo's importer also takes `input_length` and
`output_length`.

    {"id": ..., "models": [...], "block_size": 64, "tool_tokens": ..., "system_tokens": ...,
     "hash_id_scope": "local" or "global",
     "requests": [{"t": seconds, "type": "s" or "n", "model": ..., "in": ..., "out": ..., "hash_ids": [...],
                   "input_types": [...], "output_types": [...], "stop": ...},
                  {"t": ..., "type": "subagent", "requests": [...]}]}

`t` counts from the start of the session. Ids are those of full blocks; with scope local, the default, they
are ids of this session only. Requests of a sub-agent have the session's clock; if they begin before the
sub-agent, they count from its start.
"""

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.replay.decompression import decompress
from kv_pool.replay.formats.foreign_request import (
    ForeignRequest,
    check_block_size,
    check_blocks,
    check_lengths,
)

READ_LOSSES = (
    "how sessions overlap: the format has none; --session-gap places them",
    "models, types, stop reasons, api_time, think_time, and which requests are a sub-agent's",
)
WRITE_LOSSES = (
    "when sessions start, and how they overlap",
    "tenants",
    "ids of partial last blocks",
)
MAX_FILE_BYTES = 1 << 30
"""Maximum decompressed size of a session's file, which is read as a whole."""


class _Request(msgspec.Struct):
    t: float = 0.0
    type: str = "n"
    num_in: int | None = msgspec.field(name="in", default=None)
    out: int | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    requests: list["_Request"] | None = None


class _Session(msgspec.Struct):
    block_size: int
    requests: list[_Request]
    id: object = None
    hash_id_scope: str = "local"


class KVCacheTesterReader:
    """Reads sessions and merges their requests by time.

    Args:
        path: a session's file, or a folder of files trace_*.json (plain or compressed).
        session_gap_s: seconds between the starts of two sessions, in the order of their file names. A
            session is in memory from its start to its end.

    Raises:
        InvalidArgumentError: the gap is not 0 or more.
        TraceError: the folder has no sessions; while iterating, a file is broken. With `skip_broken`, a
            broken file is skipped.
    """

    def __init__(self, path: Path, skip_broken: bool = False, session_gap_s: float = 0.0) -> None:
        if not 0 <= session_gap_s < float("inf"):
            raise InvalidArgumentError(f"the session gap is {session_gap_s} seconds; it must be 0 or more")
        self.block_size: int | None = None
        self.num_broken = 0
        self.first_broken: str | None = None
        self._gap_s = session_gap_s
        self._skip_broken = skip_broken
        self._paths = sorted(path.glob("trace_*.json*")) if path.is_dir() else [path]
        if not self._paths:
            raise TraceError(f"{path}: the folder has no files trace_*.json")

    def __iter__(self) -> Iterator[ForeignRequest]:
        self.num_broken = 0
        self.first_broken = None
        # (arrival in ms, session, index of the request, requests of the session)
        pending: list[tuple[float, int, int, Sequence[ForeignRequest]]] = []
        for number, path in enumerate(self._paths):
            start_ms = number * self._gap_s * 1000
            yield from _take_before(pending, start_ms)
            requests = self._read_session(path, number, start_ms)
            if requests:
                heapq.heappush(pending, (requests[0].arrival_ms, number, 0, requests))
        yield from _take_before(pending, float("inf"))

    def _read_session(self, path: Path, number: int, start_ms: float) -> list[ForeignRequest]:
        """Return a session's requests, sorted by time."""
        try:
            session = msgspec.json.decode(_read_file(path), type=_Session)
            block_size = check_block_size(session.block_size, self.block_size)
            name = str(session.id) if session.id is not None else path.stem
            scope = None if session.hash_id_scope == "global" else number
            requests = [
                _make_request(one, t, start_ms, name, scope, block_size)
                for one, t in _flatten(session.requests, 0.0)
            ]
        except UNDECODABLE as error:
            message = str(error) if isinstance(error, TraceError) else f"{path}:1: {error}"
            if not self._skip_broken:
                raise TraceError(f"{message} (--skip-broken skips such files)") from error
            self.num_broken += 1
            self.first_broken = self.first_broken or message
            return []
        self.block_size = block_size
        requests.sort(key=lambda request: request.arrival_ms)
        return requests


def _take_before(
    pending: list[tuple[float, int, int, Sequence[ForeignRequest]]], end_ms: float
) -> Iterator[ForeignRequest]:
    """Yield the pending requests that arrive before `end_ms`, in order."""
    while pending and pending[0][0] < end_ms:
        _, number, index, requests = heapq.heappop(pending)
        yield requests[index]
        if index + 1 < len(requests):
            heapq.heappush(pending, (requests[index + 1].arrival_ms, number, index + 1, requests))


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as raw, decompress(raw, path) as content:
            data = content.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TraceError(f"{path}: cannot open: {error.strerror or error}") from error
    except TraceError:
        raise
    except Exception as error:  # each decompressor has its own exceptions
        raise TraceError(f"{path}:1: cannot decompress: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise TraceError(f"{path}:1: the session has more than {MAX_FILE_BYTES:,} bytes")
    return data


def _flatten(requests: list[_Request], offset_s: float) -> Iterator[tuple[_Request, float]]:
    """Yield the requests, those of sub-agents included, with their times on the session's clock."""
    for request in requests:
        t = offset_s + request.t
        if request.type != "subagent":
            yield request, t
            continue
        inner = request.requests or []
        is_relative = any(offset_s + one.t < t for one in inner)
        yield from _flatten(inner, t if is_relative else offset_s)


def _make_request(
    request: _Request, t: float, start_ms: float, name: str, scope: int | None, block_size: int
) -> ForeignRequest:
    num_in = request.input_length if request.num_in is None else request.num_in
    num_out = (request.output_length if request.out is None else request.out) or 0
    if num_in is None or request.hash_ids is None:
        raise ValueError("a request has no `in` or no `hash_ids`")
    check_lengths(num_in, num_out, start_ms + t * 1000)
    check_blocks(num_in, len(request.hash_ids), block_size)
    return ForeignRequest(
        1,
        start_ms + t * 1000,
        num_in,
        num_out,
        blocks=[(scope, hash_id) for hash_id in request.hash_ids],
        session_id=name,
    )


def begin_session(session_id: str, block_size: int) -> bytes:
    """Return the beginning of a session's document."""
    head = {
        "id": session_id,
        "models": ["unknown"],
        "block_size": block_size,
        "hash_id_scope": "global",
        "tool_tokens": 0,
        "system_tokens": 0,
    }
    return msgspec.json.encode(head)[:-1] + b',"requests":['


def make_session_request(request: ForeignRequest, start_ms: float, block_size: int) -> dict[str, Any]:
    """Return a request with integer keys, for the document of a session that starts at `start_ms`."""
    return {
        "t": (request.arrival_ms - start_ms) / 1000,
        "type": "n",
        "model": "unknown",
        "in": request.input_length,
        "out": request.output_length,
        "hash_ids": list(request.blocks or ())[: request.input_length // block_size],
        "input_types": [],
        "output_types": [],
        "stop": "",
    }
