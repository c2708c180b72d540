"""`convert_trace`: from one format of traces and request logs to another."""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Annotated

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError, TraceError, describe_known
from kv_pool.lab.formats.csv_lengths import CsvReader
from kv_pool.lab.formats.dynamo import DynamoReader
from kv_pool.lab.formats.event_lines import EventLineReader
from kv_pool.lab.formats.foreign_reader import ForeignReader
from kv_pool.lab.formats.kv_cache_tester import KVCacheTesterReader, begin_session, make_session_request
from kv_pool.lab.formats.lmcache import LMCacheReader
from kv_pool.lab.formats.mooncake import MooncakeReader
from kv_pool.lab.formats.qwen_bailian import QwenBailianReader
from kv_pool.lab.formats.vllm_log import VLLMLogReader
from kv_pool.lab.trace import TraceRequest, describe_suspicious_times
from kv_pool.lab.trace_writer import open_parts, open_trace_writer
from kv_pool.option import Option, check_options, describe_options, setting
from kv_pool.shared_options import MS_PER_UNIT, TIME_UNIT, TRACE_BLOCK_SIZE

_READERS: dict[str, type[ForeignReader]] = {
    "mooncake": MooncakeReader,
    "kv-cache-tester": KVCacheTesterReader,
    "lmcache": LMCacheReader,
    "vllm": VLLMLogReader,
    "dynamo": DynamoReader,
    "qwen-bailian": QwenBailianReader,
    "csv": CsvReader,
    "events": EventLineReader,
}

READ_LOSSES = {name: reader.losses for name, reader in _READERS.items()}
"""The formats that can be read, each with what is lost or unknown."""

WRITE_LOSSES = {name: reader.write_losses for name, reader in _READERS.items() if reader.write_losses}
"""The formats that can be written, each with what is lost."""

DEFAULT_BLOCK_SIZE = 16
MAX_REORDERED = 10_000
"""Requests that are held back to sort them: logs are in the order in which requests end."""


@describe_options
@dataclass(frozen=True)
class ConvertSettings:
    """The settings of a conversion.

    Attributes:
    """

    source: Annotated[str, Option("The file or folder to read.", metavar="INPUT", is_argument=True)]
    source_format: Annotated[
        str,
        Option(
            f"Format of the input: {', '.join(READ_LOSSES)}.", flags=("--from",), known=lambda: READ_LOSSES
        ),
    ]
    target_format: str = setting(
        f"Format of the output: {', '.join(WRITE_LOSSES)}.",
        default="mooncake",
        name="target_format",
        flags=("--to",),
        known=lambda: WRITE_LOSSES,
    )
    trace_block_size: int | None = setting(TRACE_BLOCK_SIZE, default=None)
    block_size: int | None = setting(
        "Tokens per block, to turn token ids and lengths into hash ids. Default: token ids stay token "
        f"ids where the output can hold them, otherwise {DEFAULT_BLOCK_SIZE}.",
        default=None,
        min=1,
    )
    session_gap_s: float = setting(
        "Seconds between the starts of two sessions, for --from kv-cache-tester.",
        default=0.0,
        name="session_gap",
        metavar="SECONDS",
        min=0.0,
    )
    timestamp_unit: str | None = setting(
        f"Unit of the input's times: {', '.join(MS_PER_UNIT)}. Default: the format's.",
        default=None,
        flags=TIME_UNIT.flags,
    )
    skip_broken: bool = setting("Skip broken lines and count them, instead of stopping.", default=False)

    def check(self) -> None:
        """Raise InvalidArgumentError if a format cannot be read or written, or a value is invalid."""
        if self.target_format == "events":
            raise InvalidArgumentError(
                "events depend on a pool and its size: run kv-pool replay TRACE --blocks N --publish "
                "ADDRESS, and record them with kv-pool events ADDRESS --json"
            )
        for name, known in ((self.source_format, READ_LOSSES), (self.target_format, WRITE_LOSSES)):
            if name not in known:
                raise InvalidArgumentError(f"unknown format {name!r}; {describe_known(name, known)}")
        if self.timestamp_unit is not None and self.source_format in ("vllm", "events"):
            raise InvalidArgumentError(
                f"--time-unit has no effect on {self.source_format}, whose times are dates or seconds"
            )
        check_options(self)


@dataclass
class ConvertReport:
    """The result of a conversion.

    Attributes:
        num_requests: requests written.
        num_late: requests that arrive before one that is written earlier, because more than `MAX_REORDERED`
            requests came between them.
        num_lengths: requests of which only lengths are known, whose blocks are new ones.
        block_size: tokens per hash id; None for token ids.
        num_broken, first_broken: skipped lines, and the error of the first.
        notes: what the reader noticed: files that were not read, requests of which only lengths are known,
            times that look like another unit.
    """

    num_requests: int = 0
    num_late: int = 0
    num_lengths: int = 0
    block_size: int | None = None
    num_broken: int = 0
    first_broken: str | None = None
    notes: tuple[str, ...] = ()


def convert_trace(settings: ConvertSettings, output: str) -> ConvertReport:
    """Read a trace or request log, and write it in another format.

    Requests are sorted by arrival, and arrive relative to the first one. Keys of blocks become hash ids,
    numbered by first appearance.

    Args:
        output: the file to write; for kv-cache-tester a path with `{part}` for the session, such as
            `traces/trace_{part}.json`.
    Raises:
        InvalidArgumentError: the settings are invalid.
        TraceError: the input cannot be read or has no requests, or the output cannot be written. No file has
            changed.

    Memory: a number for each distinct block, and `MAX_REORDERED` requests.
    """
    settings.check()
    reader = _READERS[settings.source_format](
        Path(settings.source),
        skip_broken=settings.skip_broken,
        block_size=settings.trace_block_size,
        timestamp_unit=settings.timestamp_unit,
        session_gap_s=settings.session_gap_s,
    )
    report = ConvertReport()
    first_arrivals_ms: list[float] = []
    requests = _renumber(_sort(reader, output, report, first_arrivals_ms), settings, reader, report)
    if settings.target_format == "kv-cache-tester":
        _write_sessions(requests, report, output)
    else:
        _write_lines(settings, requests, report, output)
    report.num_broken, report.first_broken = reader.num_broken, reader.first_broken
    notes = list(reader.notes)
    if report.num_lengths:
        notes.append(
            f"only lengths are known of {report.num_lengths:,} requests: each has blocks of its own, and "
            "none is hit"
        )
    why = describe_suspicious_times(first_arrivals_ms)
    if why is not None and settings.source_format != "mooncake":  # of which `Trace` warns
        notes.append(why)
    report.notes = tuple(notes)
    return report


def _sort(
    requests: Iterable[TraceRequest], output: str, report: ConvertReport, first_arrivals_ms: list[float]
) -> Iterator[TraceRequest]:
    """Yield requests by arrival, as far as `MAX_REORDERED` requests tell, the first one at 0 ms.

    Raises:
        TraceError: there is no request for the output.
    """
    pending: list[tuple[float, int, TraceRequest]] = []
    first_ms = last_ms = float("-inf")
    for number, request in enumerate(chain(requests, repeat(None))):
        if request is not None:
            heapq.heappush(pending, (request.arrival_ms, number, request))
            if len(pending) <= MAX_REORDERED:
                continue
        elif not report.num_requests and not pending:
            raise TraceError(f"{output}: not written: the input contains no request")
        elif not pending:
            return
        arrival_ms, _, found = heapq.heappop(pending)
        report.num_late += arrival_ms < last_ms
        last_ms = max(last_ms, arrival_ms)
        if not report.num_requests:
            first_ms = arrival_ms
        report.num_requests += 1
        # Rounded to microseconds: times since 1970 have no more.
        arrival_ms = round(max(0.0, arrival_ms - first_ms), 3)
        if len(first_arrivals_ms) < 1000:
            first_arrivals_ms.append(arrival_ms)
        yield replace(found, arrival_ms=arrival_ms)


def _renumber(
    requests: Iterable[TraceRequest],
    settings: ConvertSettings,
    reader: ForeignReader,
    report: ConvertReport,
) -> Iterator[TraceRequest]:
    """Turn keys into ids numbered by first appearance, and tokens into keys if wanted."""
    numbers = count()
    ids: defaultdict[Hashable, int] = defaultdict(numbers.__next__)
    size = settings.block_size
    if size is None and settings.target_format not in ("mooncake", "vllm"):
        size = DEFAULT_BLOCK_SIZE
    hasher = None if size is None else BlockHasher("xxh3_128", "0", size)
    for request in requests:
        blocks = request.hash_ids
        if blocks is not None:
            report.block_size = reader.block_size
        elif request.token_ids is None:
            report.num_lengths += 1
            report.block_size = reader.block_size or size or DEFAULT_BLOCK_SIZE
            num_blocks = -(-request.input_length // report.block_size)
            yield replace(request, hash_ids=list(islice(numbers, num_blocks)))
            continue
        elif hasher is not None:
            report.block_size = size
            blocks = hasher.hash_blocks(request.token_ids)
        if blocks is None:
            yield request
        else:
            yield replace(request, token_ids=None, hash_ids=[ids[one] for one in blocks])


def _write_lines(
    settings: ConvertSettings,
    requests: Iterable[TraceRequest],
    report: ConvertReport,
    output: str,
) -> None:
    with open_trace_writer(output) as write:
        for number, request in enumerate(requests, 1):
            try:
                lines = _READERS[settings.target_format].make_lines(request, number, report.block_size)
            except ValueError as error:
                raise TraceError(f"{settings.source}:{request.line}: {error}") from error
            for line in lines:
                write(line)


def _write_sessions(requests: Iterable[TraceRequest], report: ConvertReport, pattern: str) -> None:
    """Write each session to a file of its own; requests without a session are sessions of one request.

    Args:
        pattern: path of the files, with `{part}` for the number of the session.
    Raises:
        InvalidArgumentError: the pattern has no `{part}`, or there are too many sessions.
        TraceError: a request cannot be read, or a file not written. No file has changed.
    """
    sessions: dict[tuple[str | None, str | None, int], tuple[str, float]] = {}
    with open_parts(pattern) as parts:
        for request in requests:
            block_size = report.block_size or DEFAULT_BLOCK_SIZE
            number = request.line if request.session_id is None else 0
            key = (request.tenant, request.session_id, number)
            found = sessions.get(key)
            if found is None:
                part = f"{len(sessions) + 1:04}"
                sessions[key] = found = (part, request.arrival_ms)
                name = request.session_id if request.session_id is not None else f"request-{request.line}"
                parts.append(part, request.line, begin_session(name, block_size))
            else:
                parts.append(found[0], request.line, b",\n")
            line = make_session_request(request, found[1], block_size)
            parts.append(found[0], request.line, parts.encode(line))
        for part, _ in sessions.values():
            parts.append(part, 0, b"]}\n")
