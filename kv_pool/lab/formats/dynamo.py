"""NVIDIA Dynamo's request traces, and the Mooncake-style rows of its tools.

Sources: ai-dynamo/dynamo, docs/agents/agent-tracing.md at commit 01a60e6 (records `request_end` with
`request.replay`, the sink's wrapper, the schema name dynamo.agent.trace.v1), docs/agents/agent-replay.md at
067f73c (schema dynamo.request.trace.v1), docs/dynosim/trace-formats.md at 3fb0007 (Mooncake rows with
`created_time`, `delay` and `delay_ms`), lib/data-gen/src/mooncake.rs at 0c7705a (other names of fields, and
rows of agents) and lib/data-gen/src/weka.rs at 2fa50e0 (rows of version 2), and the records in its tests.

    {"timestamp": ..., "event": {"schema": "dynamo.request.trace.v1", "event_type": "request_end",
     "event_time_unix_ms": ..., "agent_context": {"session_id": ...},
     "request": {"request_id": ..., "request_received_ms": ..., "output_tokens": ...,
                 "replay": {"trace_block_size": ..., "input_length": ..., "input_sequence_hashes": [...]}}}}

A record is written when its request ends. `input_sequence_hashes` has one hash for each block, a partial last
one included; a hash covers its block and all before it. A sink that rotates writes shards,
PREFIX.000000.jsonl.gz and so on.

    {"request_id": ..., "session_id": ..., "timestamp" or "created_time": ms, "delay" or "delay_ms": ...,
     "input_length" or "input_tokens": ..., "output_length" or "output_tokens": ..., "hash_ids": [...],
     "wait_for": [request ids], "tool_wait_ms": ...}

A row of an agent waits for the ends of other rows, then for its delay and its tools. Without a timestamp, it
arrives then. Rows of version 2 have a header with the block size; their ids are those of one `play_id`.

    {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": ..., "hash_id_scope": "local", ...}
    {"request_id": ..., "play_id": ..., "session_id": ..., "not_before_ms": ..., "recorded_api_time_ms": ...,
     "dependencies": [{"request_id": ..., "trigger": "dispatch" or "completion", "delay_ms": ...}],
     "input_length": ..., "output_length": ..., "hash_ids": [...]}
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec

from kv_pool.lab.formats.foreign_reader import ForeignReader, check_block_size
from kv_pool.lab.line_reader import LineReader
from kv_pool.lab.trace import TraceRequest, check_lengths

SCHEMA = "dynamo.request.trace.v1"
SCHEMAS = (SCHEMA, "dynamo.agent.trace.v1")
ROWS_SCHEMA = "dynamo.agentic_mooncake"
ROWS_VERSION = 2

_MASK = (1 << 64) - 1
_Number = TypeVar("_Number", int, float)


class _Replay(msgspec.Struct):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]


class _Request(msgspec.Struct):
    replay: _Replay | None = None
    request_received_ms: float | None = None
    total_time_ms: float | None = None
    output_tokens: int | None = None


class _Context(msgspec.Struct):
    session_id: str | None = None
    trajectory_id: str | None = None


class _Dependency(msgspec.Struct):
    request_id: str | int
    trigger: str | None = None
    delay_ms: float | None = None


class _Event(msgspec.Struct):
    schema: str | None = None
    event_type: str | None = None
    event_time_unix_ms: float | None = None
    agent_context: _Context | None = None
    request: _Request | None = None


class _Line(_Event):
    event: _Event | None = None
    # Mooncake rows
    hash_ids: list[int] | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    session_id: object = None
    request_id: object = None
    wait_for: list[str | int] | None = None
    tool_wait_ms: float | None = None
    # Rows of version 2, and their header
    version: int | None = None
    block_size: int | None = None
    hash_id_scope: str | None = None
    play_id: object = None
    not_before_ms: float | None = None
    recorded_api_time_ms: float | None = None
    dependencies: list[_Dependency] | None = None


_decode = msgspec.json.Decoder(_Line).decode

_Key = tuple[str, str | int]
"""The name of a row: its request id or a number."""


@dataclass(slots=True)
class _Row:
    """A row whose arrival may depend on rows that come later in the file.

    Attributes:
        request: the request; its arrival is the earliest one.
        name: None if no row can wait for this one.
        needed: (name, whether its end counts, delay in ms) of the rows that it waits for.
        duration_ms: how long it took; 0 if that is unknown.
    """

    request: TraceRequest
    reader: LineReader
    name: _Key | None
    needed: list[tuple[_Key, bool, float]]
    duration_ms: float = 0.0


class DynamoReader(ForeignReader):
    """Reads a request trace, or Mooncake-style rows. Events other than `request_end` are passed over.

    A folder has shards *.jsonl. `block_size` is that of Mooncake-style rows without a header, and
    `timestamp_unit` the unit of `timestamp` and `created_time`.

    Raises:
        TraceError: the folder has no shards; while iterating, a line is broken, the block size changes, or a
            row waits for a row that does not come.

    Memory: the rows that wait for later ones, and two numbers for each row with a request id or a session.
    """

    losses = (
        "tool events, finish reasons, workers, models and parent sessions",
        "arrivals of records without request_received_ms and total_time_ms: the end of the request is taken",
        "how long requests take: a row that waits for others arrives its delay after their arrivals, unless "
        "its timestamp is later",
    )
    write_losses = (
        "durations: each request ends when it arrives",
        "tenants",
        "a partial last block without an id gets a hash of its own",
    )

    log_names = (r".*\.jsonl", "*.jsonl")
    default_unit = "ms"

    def __iter__(self) -> Iterator[TraceRequest]:
        self.block_size = None
        self._row_block_size = self._given_block_size
        # The arrivals and ends of rows, the rows that wait for a row, and the last row of each session.
        self._times: dict[_Key, tuple[float, float]] = {}
        self._waiting: dict[_Key, list[_Row]] = {}
        self._last: dict[str, _Key] = {}
        self._row_numbers = count()
        for reader in self._files:
            self._is_local = False
            for row in reader.read(partial(self._parse_record, reader)):
                if row is not None:
                    yield from self._place(row)
        for (_, name), rows in self._waiting.items():
            for row in rows:
                why = f"the row waits for {name!r}, which is not in the input or waits for this row"
                row.reader.pass_broken(row.request.line, ValueError(why))

    def _parse_record(self, reader: LineReader, text: bytes, line: int) -> _Row | None:
        record = _decode(text)
        if record.schema == ROWS_SCHEMA:
            self._parse_header(record)
            return None
        if record.hash_ids is not None:
            return self._parse_row(record, record.hash_ids, reader, line)
        event = record.event or record
        if event.schema not in SCHEMAS:
            raise ValueError(f"the schema is {event.schema!r}; known are {', '.join(SCHEMAS)}")
        if event.event_type != "request_end":
            return None
        request = event.request or _Request()
        if request.replay is None:
            raise ValueError(
                "the request has no replay hashes; Dynamo leaves them out if its option for replay hashes is "
                "off"
            )
        arrival_ms = request.request_received_ms
        if arrival_ms is None:
            arrival_ms = (event.event_time_unix_ms or 0.0) - (request.total_time_ms or 0.0)
        replay = request.replay
        context = event.agent_context or _Context()
        found = TraceRequest(
            line,
            arrival_ms,
            replay.input_length,
            request.output_tokens or 0,
            hash_ids=[one & _MASK for one in replay.input_sequence_hashes],
            session_id=context.trajectory_id or context.session_id,
        )
        return _Row(self._check_blocks(found, replay.trace_block_size), reader, None, [])

    def _parse_header(self, record: _Line) -> None:
        if record.version != ROWS_VERSION:
            raise ValueError(f"the version of {ROWS_SCHEMA} is {record.version}; known is {ROWS_VERSION}")
        if record.block_size is None:
            raise ValueError("the header has no block_size")
        self._row_block_size = check_block_size(record.block_size, self._row_block_size)
        self._is_local = record.hash_id_scope != "global"

    def _parse_row(self, record: _Line, hash_ids: list[int], reader: LineReader, line: int) -> _Row:
        block_size = self._row_block_size
        if block_size is None:
            raise ValueError("Mooncake-style lines do not contain their block size; give --trace-block-size")
        input_length = _take_one("input_length", record.input_length, "input_tokens", record.input_tokens)
        if input_length is None:
            input_length = len(hash_ids) * block_size
        outputs = record.output_length, record.output_tokens
        output_length = _take_one("output_length", outputs[0], "output_tokens", outputs[1]) or 0
        timestamp = _take_one("timestamp", record.timestamp, "created_time", record.created_time)
        delay_ms = _take_one("delay", record.delay, "delay_ms", record.delay_ms) or 0.0
        delay_ms += record.tool_wait_ms or 0.0
        arrival_ms = 0.0 if timestamp is None else timestamp * self._ms_per_unit
        session_id = None if record.session_id is None else str(record.session_id)
        needed: list[tuple[_Key, bool, float]]
        needed = [(("request", str(one)), True, delay_ms) for one in record.wait_for or ()]
        for one in record.dependencies or ():
            is_end = one.trigger != "dispatch"
            needed.append((("request", str(one.request_id)), is_end, one.delay_ms or 0.0))
        arrival_ms = max(arrival_ms, record.not_before_ms or 0.0)
        if not needed and timestamp is None and record.not_before_ms is None:
            if session_id is not None and session_id in self._last:
                needed = [(self._last[session_id], True, delay_ms)]
            else:
                arrival_ms = delay_ms
        name: _Key | None = None
        if record.request_id is not None:
            name = ("request", str(record.request_id))
        elif session_id is not None:
            name = ("row", next(self._row_numbers))
        if name is not None and session_id is not None:
            self._last[session_id] = name
        keys: list[Any] = hash_ids
        if self._is_local:
            play = record.play_id if isinstance(record.play_id, Hashable) else str(record.play_id)
            keys = [(play, one) for one in hash_ids]
        request = TraceRequest(
            line, arrival_ms, input_length, output_length, hash_ids=keys, session_id=session_id
        )
        self._check_blocks(request, block_size)
        return _Row(request, reader, name, needed, max(0.0, record.recorded_api_time_ms or 0.0))

    def _place(self, row: _Row) -> Iterator[TraceRequest]:
        """Yield the request of a row, and those that waited for it, once the rows that it needs are known."""
        ready = [row]
        while ready:
            row = ready.pop()
            missing = next((name for name, _, _ in row.needed if name not in self._times), None)
            if missing is not None:
                self._waiting.setdefault(missing, []).append(row)
                continue
            request = row.request
            for name, is_end, delay_ms in row.needed:
                request.arrival_ms = max(request.arrival_ms, self._times[name][is_end] + delay_ms)
            try:
                check_lengths(request.input_length, request.output_length, request.arrival_ms)
            except ValueError as error:
                row.reader.pass_broken(request.line, error)
                continue
            yield request
            if row.name is not None:
                self._times[row.name] = (request.arrival_ms, request.arrival_ms + row.duration_ms)
                ready += self._waiting.pop(row.name, [])

    @staticmethod
    def make_lines(request: TraceRequest, number: int, block_size: int | None) -> list[dict[str, Any]]:
        """Return the `request_end` record of a request."""
        assert block_size is not None, "token ids are hashed for this format"
        hashes = list(request.hash_ids or ())
        if len(hashes) * block_size < request.input_length:
            hashes.append((1 << 63) + number)
        arrival_ms = int(request.arrival_ms)
        event: dict[str, Any] = {
            "schema": SCHEMA,
            "event_type": "request_end",
            "event_time_unix_ms": arrival_ms,
            "event_source": "dynamo",
            "request": {
                "request_id": f"request-{number}",
                "request_received_ms": arrival_ms,
                "input_tokens": request.input_length,
                "output_tokens": request.output_length,
                "replay": {
                    "trace_block_size": block_size,
                    "input_length": request.input_length,
                    "input_sequence_hashes": hashes,
                },
            },
        }
        if request.session_id is not None:
            event["agent_context"] = {"session_id": request.session_id}
        return [{"timestamp": arrival_ms, "event": event}]


def _take_one(name: str, value: _Number | None, other: str, other_value: _Number | None) -> _Number | None:
    """Return the value of a field with two names. Raises ValueError if they have different values."""
    if value is not None and other_value is not None and value != other_value:
        raise ValueError(f"{name} is {value} and {other} is {other_value}; they are names of one field")
    return other_value if value is None else value
