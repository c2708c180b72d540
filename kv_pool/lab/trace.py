"""`Trace`: a file of requests, read line by line in bounded memory.

README.md in this folder documents fields, limits and conventions.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError, describe_known
from kv_pool.lab.line_reader import MAX_DECOMPRESSED_BYTES, MAX_LINE_BYTES, LineReader
from kv_pool.loggers import get_logger
from kv_pool.shared_options import BUNDLED_TRACES, MS_PER_UNIT

MAX_LENGTH = 10**9
"""Maximum number of tokens of a prompt or an output. A longer one is broken."""

MAX_ARRIVAL_MS = 1e17
"""Maximum arrival, three million years. A later one is broken."""

_EXAMPLE_LINE = '{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}'
_CANDIDATE_BLOCK_SIZES = tuple(1 << power for power in range(13))
_LINES_TO_INFER_FROM = 1000

# Timestamps that begin so late count from 1970: in ms, or in seconds that were taken for ms.
_EPOCH_MS = 1e11
_EPOCH_S_AS_MS = 1e9
# More requests per second than this are seconds taken for ms, or a very large service. Fractions are usual in
# seconds and rare in ms, also of few requests within a short time.
_SUSPICIOUS_RATE = 200.0
_SUSPICIOUS_RATE_OF_FRACTIONS = 20.0
_SUSPICIOUS_SPAN_OF_FRACTIONS_S = 10.0

_logger = get_logger(__name__)
_warned: set[str] = set()


@dataclass(slots=True)
class TraceRequest:
    """One request of a trace, or of a file in another format.

    Attributes:
        line: its line number in the file, from 1.
        arrival_ms: milliseconds since the trace's first request; in another format, on any clock.
        input_length, output_length: number of tokens; 0 generated tokens if the format does not tell.
        hash_ids: block ids at the trace's block size, or None. In another format any keys, one per block of
            the prompt, head first, with or without one for a partial last block: equal keys mean that the
            prompts are equal up to the end of the block.
        token_ids: the prompt's tokens, or None. A trace has either `hash_ids` or `token_ids`; another format
            may have neither, and then only lengths are known.
        session_id: the request's conversation, or None. With a tenant, `tenant/session_id` of a trace's line.
        tenant: the source of the request in a merged trace, or None.

    Raises:
        ValueError: a length or the arrival is out of range.
    """

    line: int
    arrival_ms: float
    input_length: int
    output_length: int = 0
    hash_ids: list[Any] | None = field(default=None, repr=False)
    token_ids: list[int] | None = field(default=None, repr=False)
    session_id: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        check_lengths(self.input_length, self.output_length, self.arrival_ms)


class _Record(msgspec.Struct):
    timestamp: float | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    session_id: object = None
    tenant: object = None


_decode = msgspec.json.Decoder(_Record).decode


class Trace(LineReader):
    """A trace file. Each iteration reads it from the start.

    Args:
        path: a file, or the name of a bundled trace.
        block_size: tokens per hash id; None infers it from the first lines.
        timestamp_unit: "ms", "s", "us" or "ns". Timestamps that look like another unit, or like times since
            1970, are logged as a warning, once.
        skip_broken: skip broken lines and count them in `num_broken`, instead of raising an error.
        max_line_bytes: maximum length of a line, also in memory. A longer line is broken.
        max_decompressed_bytes: maximum decompressed size. Reading beyond it is an error.

    Attributes:
        path: the file.
        block_size: tokens per hash id; None for a trace of token ids.
        num_broken: number of broken lines in the last iteration.
        first_broken: the error message of the first broken line, or None.
        position: share of the file read in the current iteration, 0 to 1.

    Raises:
        TraceError: the file is missing, its compression or records are unknown, or the block size cannot be
            inferred. While iterating: a line is broken (the message has file and line number), or the
            decompressed size exceeds the limit.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        block_size: int | None = None,
        timestamp_unit: str = "ms",
        skip_broken: bool = False,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
    ) -> None:
        self._ms_per_unit = find_ms_per_unit(timestamp_unit)
        if block_size is not None and block_size < 1:
            raise InvalidArgumentError(f"the trace's block size is {block_size}; it must be 1 token or more")
        super().__init__(find_trace(path), max_line_bytes, max_decompressed_bytes, skip_broken=skip_broken)
        self.block_size = block_size
        self._is_checked = False
        self.block_size = self._check_first_lines()
        self._is_checked = True

    def __repr__(self) -> str:
        ids = "token ids" if self.block_size is None else f"{self.block_size} tokens per hash id"
        return f"<Trace {str(self.path)!r}: {ids}, {self.position:.0%} read>"

    def digest(self) -> str:
        """Return the SHA-256 of the file as stored, in hex."""
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __iter__(self) -> Iterator[TraceRequest]:
        return (request for request, _ in self.read_lines())

    def read_lines(self) -> Iterator[tuple[TraceRequest, bytes]]:
        """Yield each request with the text of its line, which may have other fields. Raises TraceError."""
        return self.read(self._parse, f"; a trace has one JSON object per line, such as {_EXAMPLE_LINE}")

    def _parse(self, text: bytes, line: int) -> tuple[TraceRequest, bytes]:
        """Return the request of a line. Raises ValueError, also with a number of ids that does not fit."""
        record = _decode(text)
        token_ids = record.token_ids if record.token_ids is not None else record.prompt_token_ids
        hash_ids = record.hash_ids
        if (hash_ids is None) == (token_ids is None):
            raise ValueError("a request must have either hash_ids or token_ids (or prompt_token_ids)")
        input_length = record.input_length
        if token_ids is not None:
            if input_length is not None and input_length != len(token_ids):
                raise ValueError(f"input_length is {input_length} but there are {len(token_ids)} token ids")
            input_length = len(token_ids)
            check_ids(token_ids, "token id")
        if input_length is None:
            raise ValueError("a request with hash_ids needs its input_length")
        session_id, tenant = (None if one is None else str(one) for one in (record.session_id, record.tenant))
        if session_id is not None and tenant is not None:
            session_id = f"{tenant}/{session_id}"  # conversations of different tenants are different
        request = TraceRequest(
            line,
            (record.timestamp or 0.0) * self._ms_per_unit,
            input_length,
            record.output_length or 0,
            hash_ids,
            token_ids,
            session_id,
            tenant,
        )
        if hash_ids is not None:
            check_ids(hash_ids, "hash id")
            if self._is_checked and self.block_size is None:
                raise ValueError("hash_ids in a trace of token ids")
            if self.block_size is not None:
                check_blocks(input_length, len(hash_ids), self.block_size)
        return request, text

    def _check_first_lines(self) -> int | None:
        """Determine the kind of the trace and, unless given, its block size.

        With a block size, a broken line behind the first one ends the check; it is an error when it is read.
        """
        arrivals_ms: list[float] = []
        shapes: list[tuple[int, int]] = []
        try:
            for request in islice(self, _LINES_TO_INFER_FROM):
                arrivals_ms.append(request.arrival_ms)
                if request.hash_ids is not None:
                    shapes.append((request.input_length, len(request.hash_ids)))
        except TraceError:
            if self.block_size is None or not arrivals_ms:
                raise
        if not arrivals_ms:
            why = f"; the first broken line: {self.first_broken}" if self.first_broken else ""
            raise TraceError(f"{self.path}: the file contains no request{why}")
        warning = describe_suspicious_times(arrivals_ms)
        if warning is not None and f"{self.path} {warning}" not in _warned:
            _warned.add(f"{self.path} {warning}")
            _logger.warning("%s: %s", self.path, warning)
        if not shapes or self.block_size is not None:
            return self.block_size if shapes else None
        num_fitting = {size: sum(_fits(*shape, size) for shape in shapes) for size in _CANDIDATE_BLOCK_SIZES}
        # If broken lines are skipped, a line with a wrong count must not decide.
        wanted = len(shapes)
        if self.skip_broken and 2 * max(num_fitting.values()) > wanted:
            wanted = max(num_fitting.values())
        candidates = [size for size, fitting in num_fitting.items() if fitting == wanted]
        if len(candidates) != 1:
            found = ", ".join(map(str, candidates)) or "no power of two"
            raise TraceError(
                f"{self.path}: the tokens per hash id cannot be inferred from the first {len(arrivals_ms)} "
                f"requests ({found} would fit); give --trace-block-size"
            )
        return candidates[0]


def _fits(num_tokens: int, num_ids: int, block_size: int) -> bool:
    """Return True if `num_ids` cover `num_tokens`, with or without an id for a partial last block."""
    return num_ids in (num_tokens // block_size, -(-num_tokens // block_size))


def check_ids(ids: Sequence[int], kind: str) -> None:
    """Raise ValueError if an id, of this kind in words, is not one of 64 bits."""
    if ids and (min(ids) < 0 or max(ids) >= 2**64):
        raise ValueError(f"a {kind} is not in 0..2**64-1")


def check_lengths(input_length: int, output_length: int, arrival_ms: float) -> None:
    """Raise ValueError if a request's lengths or its arrival are out of range."""
    if not 1 <= input_length <= MAX_LENGTH:
        raise ValueError(f"the prompt has {input_length} tokens; it must have 1 to {MAX_LENGTH:,}")
    if not 0 <= output_length <= MAX_LENGTH:
        raise ValueError(f"the output has {output_length} tokens; it must have 0 to {MAX_LENGTH:,}")
    if not 0 <= arrival_ms <= MAX_ARRIVAL_MS:
        raise ValueError(
            f"the arrival is {arrival_ms:g} ms; it must be 0 to {MAX_ARRIVAL_MS:g} ms (--time-unit)"
        )


def check_blocks(num_tokens: int, num_ids: int, block_size: int) -> None:
    """Raise ValueError if ids do not cover the tokens, with or without one for a partial last block."""
    if not _fits(num_tokens, num_ids, block_size):
        raise ValueError(
            f"{num_tokens} tokens are {num_tokens / block_size:.2f} blocks of {block_size} tokens, but there "
            f"are {num_ids} ids of blocks"
        )


def find_trace(path: str | Path) -> Path:
    """Return the file of a trace, given by path or by the name of a bundled trace. Raises TraceError."""
    if Path(path).is_file():
        return Path(path)
    name = BUNDLED_TRACES.get(str(path))
    if name is not None:
        return Path(str(resources.files("kv_pool.lab") / "traces" / name))
    shipped = describe_known(str(path), BUNDLED_TRACES, "bundled traces:")
    if str(path) == "-" or Path(path).is_fifo() or Path(path).is_char_device():
        raise TraceError(
            f"{path}: a trace is read more than once, so it cannot come from standard input or a "
            "pipe; save it to a file first"
        )
    if Path(path).is_dir():
        raise TraceError(f"{path}: this is a folder; give one of its files; {shipped}")
    raise TraceError(f"{path}: no such file; {shipped}")


def find_ms_per_unit(unit: str) -> float:
    """Return the milliseconds of a unit of time. Raises InvalidArgumentError."""
    if unit not in MS_PER_UNIT:
        raise InvalidArgumentError(
            f"timestamp_unit is {unit!r}; it must be one of {', '.join(map(repr, MS_PER_UNIT))}"
        )
    return MS_PER_UNIT[unit]


def describe_suspicious_times(arrivals_ms: Sequence[float]) -> str | None:
    """Say why the first arrivals of a trace look like another unit; None if they do not."""
    if not arrivals_ms:
        return None
    first_ms = min(arrivals_ms)
    if first_ms >= _EPOCH_MS:
        return (
            f"the timestamps begin at {first_ms:,.0f} ms, like times since 1970; kv-pool trace convert makes "
            "them begin at 0"
        )
    if first_ms >= _EPOCH_S_AS_MS:
        return (
            f"the timestamps begin at {first_ms:,.0f} ms, like seconds since 1970; if they are seconds, pass "
            "--time-unit s, and kv-pool trace convert makes them begin at 0"
        )
    span_s = (max(arrivals_ms) - first_ms) / 1000
    has_fractions = any(arrival_ms % 1 for arrival_ms in arrivals_ms)
    rate = (len(arrivals_ms) - 1) / span_s if span_s else 0.0
    is_short = len(arrivals_ms) < _LINES_TO_INFER_FROM and 0 < span_s < _SUSPICIOUS_SPAN_OF_FRACTIONS_S
    if rate > _SUSPICIOUS_RATE or (has_fractions and (rate > _SUSPICIOUS_RATE_OF_FRACTIONS or is_short)):
        return (
            f"the first {len(arrivals_ms):,} requests arrive within {span_s:.3g} s; if the timestamps are "
            "seconds, pass --time-unit s"
        )
    return None
