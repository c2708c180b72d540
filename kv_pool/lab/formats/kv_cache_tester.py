"""kv-cache-tester's traces: one JSON document per session, in a file of its own or on a line.

Source: callanjfox/kv-cache-tester, docs/trace_replay_tester.md at commit 19c263b, and traces/trace_0003.json
at 83eca8e. AIPerf and Dynamo call the format Weka or AgentX traces; Dynamo's importer also takes
`input_length` and `output_length`. The data sets semianalysisai/cc-traces-weka-* have a session on each line
of traces.jsonl.

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
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kv_pool.errors import TraceError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.lab.formats.foreign_reader import ForeignReader, check_block_size
from kv_pool.lab.line_reader import LineReader
from kv_pool.lab.trace import TraceRequest, check_blocks

MAX_FILE_BYTES = 1 << 30
"""Maximum decompressed size of a session, which is read as a whole."""


class _Request(msgspec.Struct):
    t: float | None = None
    type: str | None = None
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
    hash_id_scope: str | None = None


class KVCacheTesterReader(ForeignReader):
    """Reads sessions and merges their requests by time.

    The path is a session's file, a file with a session on each line, or a folder of files trace_*.json and
    *.jsonl. `session_gap_s` places the sessions in the order of their files. A session is in memory from its
    start to its end.

    Raises:
        TraceError: the folder has no sessions; while iterating, a session is broken. With `skip_broken`, it
            is skipped.
    """

    losses = (
        "how sessions overlap: the format has none; --session-gap places them",
        "models, types, stop reasons, api_time, think_time, and which requests are a sub-agent's",
    )
    write_losses = (
        "when sessions start, and how they overlap",
        "tenants",
        "ids of partial last blocks",
    )

    log_names = (r"(trace_.*\.json|.*\.jsonl)", "trace_*.json or *.jsonl")
    max_line_bytes = MAX_FILE_BYTES

    def __iter__(self) -> Iterator[TraceRequest]:
        self._num_sessions = 0
        # (arrival in ms, session, index in the session, request)
        pending: list[tuple[float, int, int, TraceRequest]] = []
        sessions = self._read_sessions()
        while True:
            # The next session is read when it starts.
            yield from _take_before(pending, self._num_sessions * self._gap_s * 1000)
            requests = next(sessions, None)
            if requests is None:
                break
            for index, request in enumerate(requests):
                heapq.heappush(pending, (request.arrival_ms, self._num_sessions, index, request))
        yield from _take_before(pending, float("inf"))

    def _read_sessions(self) -> Iterator[list[TraceRequest]]:
        """Yield the requests of each session, sorted by time."""
        for file in self._files:
            has_lines = _has_lines(file)
            yield from file.read(partial(self._parse_session, file.path, has_lines), is_whole=not has_lines)

    def _parse_session(self, path: Path, has_lines: bool, text: bytes, line: int) -> list[TraceRequest]:
        """Return the requests of a session, which may be one of several in its file, sorted by time."""
        number = self._num_sessions
        self._num_sessions += 1
        session = msgspec.json.decode(text, type=_Session)
        block_size = check_block_size(session.block_size, self.block_size)
        unnamed = f"{path.stem}-{line}" if has_lines else path.stem
        name = str(session.id) if session.id is not None else unnamed
        scope = None if session.hash_id_scope == "global" else number
        start_ms = number * self._gap_s * 1000
        requests = []
        for one, t in _flatten(session.requests, 0.0):
            num_in = one.input_length if one.num_in is None else one.num_in
            num_out = one.output_length if one.out is None else one.out
            if num_in is None:
                raise ValueError("a request has no `in`")
            hash_ids = [(scope, hash_id) for hash_id in one.hash_ids or ()]  # short prompts may have none
            check_blocks(num_in, len(hash_ids), block_size)
            arrival_ms = start_ms + t * self._ms_per_unit
            requests.append(
                TraceRequest(line, arrival_ms, num_in, num_out or 0, hash_ids=hash_ids, session_id=name)
            )
        if any(request.arrival_ms < start_ms for request in requests):
            raise ValueError("a request has a time below 0")
        self.block_size = block_size
        requests.sort(key=lambda request: request.arrival_ms)
        return requests


def _has_lines(file: LineReader) -> bool:
    """Return True if a file has a session on each line, rather than one session."""
    if ".jsonl" in file.path.name.lower():
        return True
    try:
        first, _ = islice(file.read(lambda text, _: text), 2)
        msgspec.json.decode(first, type=_Session)
        return True
    except (TraceError, *UNDECODABLE):  # one document, or damaged: reading it says which
        return False


def _take_before(
    pending: list[tuple[float, int, int, TraceRequest]], end_ms: float
) -> Iterator[TraceRequest]:
    """Yield the pending requests that arrive before `end_ms`, in order."""
    while pending and pending[0][0] < end_ms:
        yield heapq.heappop(pending)[-1]


def _flatten(requests: list[_Request], offset_s: float) -> Iterator[tuple[_Request, float]]:
    """Yield the requests, those of sub-agents included, with their times on the session's clock."""
    for request in requests:
        t = offset_s + (request.t or 0.0)
        if request.type != "subagent":
            yield request, t
            continue
        inner = request.requests or []
        is_relative = any(offset_s + (one.t or 0.0) < t for one in inner)
        yield from _flatten(inner, t if is_relative else offset_s)


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


def make_session_request(request: TraceRequest, start_ms: float, block_size: int) -> dict[str, Any]:
    """Return a request with integer keys, for the document of a session that starts at `start_ms`."""
    return {
        "t": (request.arrival_ms - start_ms) / 1000,
        "type": "n",
        "model": "unknown",
        "in": request.input_length,
        "out": request.output_length,
        "hash_ids": list(request.hash_ids or ())[: request.input_length // block_size],
        "input_types": [],
        "output_types": [],
        "stop": "",
    }
