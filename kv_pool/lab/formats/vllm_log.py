"""vLLM's request logs: lines of its logger about requests that arrive and end.

Source: vLLM 0.33, vllm/entrypoints/serve/utils/request_logger.py (messages), vllm/logger.py (prefix of a
line, time of day without a year) and vllm/logging_utils/formatter.py (JSON lines); in older versions the
message of a request was "Received request ID: prompt: ..., prompt_token_ids: [...]". Token ids are logged
with --enable-log-requests at level DEBUG, and generated ones with --enable-log-outputs.

    (APIServer pid=7) DEBUG 11-23 18:30:01 [request_logger.py:52] Request ID details: prompt: 'text',
        prompt_token_ids: [1, 2, 3], prompt_embeds shape: None.
    (APIServer pid=7) DEBUG 11-23 18:30:02 [request_logger.py:97] Generated response ID (streaming complete)
        details: output_token_ids: [4, 5]
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.lab.formats.foreign_reader import ForeignReader
from kv_pool.lab.trace import TraceRequest, check_ids

MAX_WRITTEN_TOKENS = 4_000_000
"""Bound on tokens that are written for a number in the input. The longest contexts have a quarter of it."""

_MAX_WRITTEN_MS = 2.5e14
# With a year, a time may have a fraction of a second.
_TIME = re.compile(r"(?:(\d{4})-|\b)(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?(1)(?:[,.](\d{1,6}))?|\b)")
# The first of these in a line says what the line is; later ones may be text of a prompt or an output.
_SUBJECT = re.compile(
    r"\b(?:(?P<kind>Request|Received request|Generated response) (?P<name>\S+?)"
    r"(?P<more> \([a-z ]+\))?(?P<part> details:| JSON body:|:) )"
)
_PROMPT_TOKENS = "prompt_token_ids: "
_OUTPUT_TOKENS = "output_token_ids: "
_START = datetime(2000, 1, 1, tzinfo=UTC)  # a leap year, for logs without a year
_DELTA = " (streaming delta)"
_REQUESTS = (("Request", " details:"), ("Received request", ":"))


class _JsonLine(msgspec.Struct):
    message: object = None
    asctime: object = None


class VLLMLogReader(ForeignReader):
    """Reads a log. Lines that are not about requests are passed over.

    The file is read twice: the number of generated tokens is logged after the request. Memory: two numbers
    per request.

    Raises:
        TraceError: while iterating, a line about a request is broken.
    """

    losses = (
        "fractions of seconds, and the year, except in JSON lines",
        "sessions: the log has none",
        "generated tokens, without --enable-log-outputs at level DEBUG",
        "the end of prompts that --max-log-len cut, and prompts given as embeddings",
        "adapters, salts and multimodal inputs, which make equal tokens different blocks",
    )
    write_losses = (
        "fractions of milliseconds",
        "sessions and tenants",
        "the text of prompts and outputs",
        "hash ids: a block's tokens are all equal to its id; a partial block without an id has one of its "
        "own",
    )

    def __iter__(self) -> Iterator[TraceRequest]:
        # An id may occur again, as those of clients do: a response belongs to the request before it.
        line_of: dict[str, int] = {}
        num_outputs: dict[int, int] = {}
        for name, line, num_tokens, is_delta in self._read(_parse_subject):
            if num_tokens is None:
                line_of[name] = line
            elif name in line_of:
                at = line_of[name]
                num_outputs[at] = num_tokens + (num_outputs.get(at, 0) if is_delta else 0)
        last_ms = 0.0
        years_ms = 0.0
        for request in self._read(_parse_request):
            if request.arrival_ms + years_ms < last_ms - 180 * 86_400_000:  # the log passes a new year
                years_ms += 366 * 86_400_000
            request.arrival_ms += years_ms
            last_ms = request.arrival_ms
            request.output_length = num_outputs.get(request.line, 0)
            yield request

    @staticmethod
    def make_lines(request: TraceRequest, number: int, block_size: int | None) -> list[dict[str, Any]]:
        """Return the two lines of a request that ends when it arrives.

        Raises:
            ValueError: the prompt or the output has more than `MAX_WRITTEN_TOKENS` that are not in the input,
                or the arrival is beyond the year 9999.
        """
        tokens = request.token_ids
        if tokens is None:
            _check_written("prompt", request.input_length)
            tokens = []
            keys: list[Any] = [*(request.hash_ids or ()), (1 << 63) + number]
            for key in keys:
                tokens += [key] * min(block_size or 1, request.input_length - len(tokens))
        _check_written("output", request.output_length)
        if request.arrival_ms > _MAX_WRITTEN_MS:
            raise ValueError(
                f"the request arrives {request.arrival_ms:g} ms after the first one, beyond all dates"
            )
        when = _START + timedelta(milliseconds=request.arrival_ms)
        record = {
            "asctime": f"{when:%Y-%m-%d %H:%M:%S},{when.microsecond // 1000:03}",
            "levelname": "DEBUG",
            "name": "vllm.entrypoints.serve.utils.request_logger",
            "processName": "MainProcess",
            "process": 1,
        }
        prompt = f"prompt: None, prompt_token_ids: {tokens}, prompt_embeds shape: None."
        messages = (
            f"Request cmpl-{number} details: {prompt}",
            f"Generated response cmpl-{number} details: output_token_ids: {[0] * request.output_length}",
        )
        return [record | {"message": message} for message in messages]


def _read_message(text: bytes) -> tuple[str, str]:
    """Return the message of a line, "" for a foreign line, and the text that contains its time."""
    line = text.decode(errors="replace").strip()
    if line.startswith("{"):
        try:
            record = msgspec.json.decode(line, type=_JsonLine)
        except UNDECODABLE:
            return line, line  # a cut line, or no JSON: it may be about a request all the same
        message = record.message if isinstance(record.message, str) else ""
        return message, record.asctime if isinstance(record.asctime, str) else ""
    return line, line


def _parse_subject(text: bytes, line: int) -> tuple[str, int, int | None, bool] | None:
    """Return the id in a line about a request, and the line's number; None for another line.

    Of a response, also its number of tokens, and whether it is a part that adds to earlier ones.
    """
    message, _ = _read_message(text)
    found = _SUBJECT.search(message)
    if found is None:
        return None
    if _is_request(message, found):
        return found["name"], line, None, False
    rest = message[found.end() :]
    is_response = found["kind"] == "Generated response" and found["part"] == " details:"
    if not is_response or not rest.startswith(f"{_OUTPUT_TOKENS}["):
        return None
    num_tokens = len(_read_tokens(rest[len(_OUTPUT_TOKENS) :]))
    return found["name"], line, num_tokens, found["more"] == _DELTA


def _is_request(message: str, found: "re.Match[str]") -> bool:
    return (found["kind"], found["part"]) in _REQUESTS and message.startswith("prompt: ", found.end())


def _parse_request(text: bytes, line: int) -> TraceRequest | None:
    message, when = _read_message(text)
    found = _SUBJECT.search(message)
    if found is None or not _is_request(message, found):
        return None
    # The prompt's text comes before its tokens, and may contain anything.
    at = message.rfind(_PROMPT_TOKENS)
    if at < found.end() or message.startswith("None", at + len(_PROMPT_TOKENS)):
        raise ValueError("the request has no prompt_token_ids; log requests at level DEBUG")
    tokens = _read_tokens(message[at + len(_PROMPT_TOKENS) :])
    check_ids(tokens, "token id")
    return TraceRequest(line, _read_time(when), len(tokens), token_ids=tokens)


def _read_tokens(text: str) -> list[int]:
    """Return the list of integers at the start of a text."""
    end = text.find("]")
    if not text.startswith("[") or end < 0:
        raise ValueError("the token ids are not a list; the line may be cut off")
    try:
        return msgspec.json.decode(text[: end + 1], type=list[int])
    except msgspec.DecodeError as error:
        raise ValueError(f"the token ids are not a list of integers: {error}") from error


def _read_time(text: str) -> float:
    """Return the first time in a text, in ms."""
    found = _TIME.search(text)
    if found is None:
        raise ValueError("the line has no time such as 11-23 18:30:01")
    year, month, day, hour, minute, second = (int(one or _START.year) for one in found.groups()[:6])
    when = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    when += timedelta(seconds=float(f"0.{found[7] or 0}"))
    return (when - _START) / timedelta(milliseconds=1)


def _check_written(name: str, num_tokens: int) -> None:
    if num_tokens > MAX_WRITTEN_TOKENS:
        raise ValueError(
            f"the {name} has {num_tokens:,} tokens; a log has them one by one, and at most "
            f"{MAX_WRITTEN_TOKENS:,} are written"
        )
