"""NVIDIA Dynamo's request traces, and the Mooncake-style lines of its tools.

Sources: ai-dynamo/dynamo, docs/agents/agent-tracing.md at commit 01a60e6 (records `request_end` with
`request.replay`, the sink's wrapper, the schema name dynamo.agent.trace.v1), docs/agents/agent-replay.md at
067f73c (schema dynamo.request.trace.v1), docs/dynosim/trace-formats.md at 3fb0007 (Mooncake rows with
`created_time`, `delay` and `delay_ms`), and the records in its tests (`request_received_ms`).

    {"timestamp": ..., "event": {"schema": "dynamo.request.trace.v1", "event_type": "request_end",
     "event_time_unix_ms": ..., "agent_context": {"session_id": ...},
     "request": {"request_id": ..., "request_received_ms": ..., "output_tokens": ...,
                 "replay": {"trace_block_size": ..., "input_length": ..., "input_sequence_hashes": [...]}}}}

A record is written when its request ends. `input_sequence_hashes` has one hash for each block, a partial last
one included; a hash covers its block and all before it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kv_pool.replay.formats.foreign_request import (
    ForeignRequest,
    check_block_size,
    check_blocks,
    check_lengths,
)
from kv_pool.replay.line_reader import LineReader

SCHEMA = "dynamo.request.trace.v1"
SCHEMAS = (SCHEMA, "dynamo.agent.trace.v1")
READ_LOSSES = (
    "tool events, finish reasons, workers, models and parent sessions",
    "arrivals of records without request_received_ms and total_time_ms: the end of the request is taken",
)
WRITE_LOSSES = (
    "durations: each request ends when it arrives",
    "tenants",
    "a partial last block without an id gets a hash of its own",
)

_MASK = (1 << 64) - 1


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


class _Event(msgspec.Struct):
    schema: str | None = None
    event_type: str | None = None
    event_time_unix_ms: float = 0.0
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
    output_length: int | None = None
    session_id: object = None


class DynamoReader:
    """Reads a request trace, or Mooncake-style lines. Events other than `request_end` are passed over.

    Args:
        block_size: tokens per hash id of Mooncake-style lines, which do not contain it.

    Raises:
        TraceError: while iterating, a line is broken, or the block size changes.
    """

    def __init__(self, path: Path, skip_broken: bool = False, block_size: int | None = None) -> None:
        self.block_size: int | None = None
        self._row_block_size = block_size
        self._reader = LineReader(path, skip_broken=skip_broken)
        self._decode = msgspec.json.Decoder(_Line).decode
        self._last_ms: dict[str, float] = {}

    @property
    def num_broken(self) -> int:
        return self._reader.num_broken

    @property
    def first_broken(self) -> str | None:
        return self._reader.first_broken

    def __iter__(self) -> Iterator[ForeignRequest]:
        self._last_ms.clear()
        for found in self._reader.read(self._parse):
            if found is not None:
                yield found

    def _parse(self, text: bytes, line: int) -> ForeignRequest | None:
        record = self._decode(text)
        if record.hash_ids is not None:
            return self._parse_row(record, record.hash_ids, line)
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
            arrival_ms = event.event_time_unix_ms - (request.total_time_ms or 0.0)
        replay = request.replay
        hashes = [one & _MASK for one in replay.input_sequence_hashes]
        self.block_size = check_block_size(replay.trace_block_size, self.block_size)
        check_lengths(replay.input_length, request.output_tokens or 0, arrival_ms)
        check_blocks(replay.input_length, len(hashes), self.block_size)
        context = event.agent_context or _Context()
        session_id = context.trajectory_id or context.session_id
        return ForeignRequest(
            line,
            arrival_ms,
            replay.input_length,
            request.output_tokens or 0,
            blocks=hashes,
            session_id=session_id,
        )

    def _parse_row(self, record: _Line, hash_ids: list[int], line: int) -> ForeignRequest:
        if self._row_block_size is None:
            raise ValueError("Mooncake-style lines do not contain their block size; give --trace-block-size")
        self.block_size = check_block_size(self._row_block_size, self.block_size)
        input_length = record.input_length
        if input_length is None:
            input_length = len(hash_ids) * self.block_size
        session_id = None if record.session_id is None else str(record.session_id)
        arrival_ms = record.timestamp if record.timestamp is not None else record.created_time
        if arrival_ms is None:
            delay_ms = record.delay_ms if record.delay_ms is not None else record.delay or 0.0
            arrival_ms = self._last_ms.get(session_id or "", 0.0) + delay_ms
        output_length = record.output_length or 0
        check_lengths(input_length, output_length, arrival_ms)
        check_blocks(input_length, len(hash_ids), self.block_size)
        if session_id is not None:
            self._last_ms[session_id] = arrival_ms
        return ForeignRequest(
            line, arrival_ms, input_length, output_length, blocks=hash_ids, session_id=session_id
        )


def make_dynamo_line(request: ForeignRequest, number: int, block_size: int) -> dict[str, Any]:
    """Return the `request_end` record of a request with integer keys."""
    hashes = list(request.blocks or ())
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
    return {"timestamp": arrival_ms, "event": event}
