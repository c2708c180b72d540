"""Tables of lengths as CSV: when requests arrive, and how many tokens they have, but not which.

Sources: Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024 (`TIMESTAMP,ContextTokens,
GeneratedTokens`, dates); HPMLL/BurstGPT, releases 1.1 and 2.0 (`Timestamp,Model,Request tokens,Response
tokens,Total tokens,Log Type`, seconds; since 2.0 with `Session ID,Elapsed time` after the first column);
kubernetes-sigs/inference-perf, inference_perf/utils/trace_reader.py at commit 2c8c249 (the first three
columns, as Azure's, with or without a header).

Columns are found by name, whatever their case, spaces and underscores.
"""

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime

from kv_pool.lab.formats.foreign_reader import ForeignReader
from kv_pool.lab.trace import TraceRequest

MAX_PROMPT_TOKENS = 4_000_000
"""Bound on a prompt, whose blocks are made for a number in the file."""

_MILLISECONDS = re.compile(r"timestampms|arrival(time)?ms")
# The columns of time, prompt, output and session: their names without case, spaces and other characters.
_COLUMNS = (
    re.compile(rf"timestamp|time|arrivedat|arrival(time)?|{_MILLISECONDS.pattern}"),
    re.compile(r"(num)?(context|request|input|prompt|prefill)(tokens|length|len)"),
    re.compile(r"(num)?(generated|response|output|completion|decode)(tokens|length|len)"),
    re.compile(r"(session|conversation)id"),
)


class CsvReader(ForeignReader):
    """Reads a table. Rows without a prompt token, those of failed requests, are passed over and noted.

    Numeric times are in seconds, unless the column says ms or `timestamp_unit` is given.

    Raises:
        TraceError: while iterating, a row is broken, or no column has the lengths of prompts.
    """

    losses = (
        "prompts: only lengths exist, so that no two requests share a block. Use the trace for load, "
        "not for hit rates",
        "models, kinds of requests and elapsed times",
    )

    def __iter__(self) -> Iterator[TraceRequest]:
        self._num_failed = 0
        # The columns of time, prompt, output and session; None if there is none.
        self._columns: list[int | None] = []
        yield from super().__iter__()
        if self._num_failed:
            self.notes = [
                f"not converted: {self._num_failed:,} rows without a prompt token, those of failed requests"
            ]

    def _parse(self, text: bytes, line: int) -> TraceRequest | None:
        try:
            values = [value.strip() for value in next(csv.reader([text.decode()]))]
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if not self._columns:
            if len(values) >= 3 and values[1].isdecimal() and values[2].isdecimal():
                self._columns = [0, 1, 2, None]
            else:
                self._read_header(values)
                return None
        time, prompt, output, session = [
            "" if column is None else values[column] if column < len(values) else ""
            for column in self._columns
        ]
        input_length, output_length = _read_count(prompt), _read_count(output or "0")
        if not input_length:
            self._num_failed += 1
            return None
        if input_length > MAX_PROMPT_TOKENS:
            raise ValueError(f"the prompt has {input_length:,} tokens; it may have {MAX_PROMPT_TOKENS:,}")
        arrival_ms = self._read_time(time)
        return TraceRequest(line, arrival_ms, input_length, output_length, session_id=session or None)

    def _read_header(self, names: list[str]) -> None:
        plain = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
        columns = [
            next((index for index, name in enumerate(plain) if known.fullmatch(name)), None)
            for known in _COLUMNS
        ]
        if columns[1] is None:
            raise ValueError(
                f"no column has the tokens of prompts; the columns are {', '.join(names)[:200]}; name it "
                "ContextTokens, or context, request, input, prompt or prefill, and tokens, length or len"
            )
        if columns[0] is not None and _MILLISECONDS.fullmatch(plain[columns[0]]) and not self._has_unit:
            self._ms_per_unit = 1.0
        self._columns = columns

    def _read_time(self, text: str) -> float:
        """Return a number or a date in ms; 0 for none."""
        if not text:
            return 0.0
        try:
            return float(text) * self._ms_per_unit
        except ValueError:
            pass
        when = datetime.fromisoformat(text)
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp() * 1000


def _read_count(text: str) -> int:
    number = float(text)
    if number != int(number) or number < 0:
        raise ValueError(f"{text!r} is no number of tokens")
    return int(number)
