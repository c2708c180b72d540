"""`RequestOptions`: what a client asks for one request, as JSON.

`read_options` decodes and checks it; `find_options` finds it in a request to vLLM. Imports no vLLM.
The names of ranges, priorities and durations are those of TensorRT-LLM's `KvCacheRetentionConfig`. Do not
compile this module: compiled structs accept unknown fields.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from kv_pool.environment import LEVEL
from kv_pool.errors import InvalidArgumentError
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.integrations.vllm_warnings import warn
from kv_pool.manager.retention.directive import DEFAULT_PRIORITY, MAX_PRIORITY, RetentionDirective

MAX_RANGES: Final = 64
"""Ranges in each list of an object."""

MAX_TOKEN: Final = 2**31 - 1

MAX_DURATION_MS: Final = 7 * 24 * 3600 * 1000
"""The longest duration: a week."""

MAX_TEXT: Final = 65_536
"""Characters of an object that is sent as text."""

MAX_HINTS: Final = 16
"""Names in the hints of an object."""

MAX_HINT: Final = 2**53
"""The largest number in a hint."""

_MAX_MESSAGE: Final = 400

Token = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
Priority = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
DurationMs = Annotated[int, Meta(ge=1, le=MAX_DURATION_MS)]
SessionId = Annotated[str, Meta(min_length=1, max_length=256)]
HintName = Annotated[str, Meta(min_length=1, max_length=64)]
HintText = Annotated[str, Meta(max_length=256)]
Hint = bool | int | float | HintText


class TokenRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens `[token_start, token_end)` of a request; without an end, up to the last one as it grows."""

    token_start: Token = 0
    token_end: Token | None = None

    def __post_init__(self) -> None:
        if self.token_end is not None and self.token_end <= self.token_start:
            raise ValueError(
                f"tokens {self.token_start} to {self.token_end} are none; token_end must be above token_start"
            )


class TokenRangeRetention(TokenRange, frozen=True, forbid_unknown_fields=True):
    """A `RetentionDirective` in JSON: how long the blocks of a range of tokens are retained.

    `duration_ms` counts from the moment at which no request uses the block any more. A pin needs an end and a
    duration, so that a client that has gone cannot keep blocks for ever.
    """

    priority: Priority = DEFAULT_PRIORITY
    duration_ms: DurationMs | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pin and (self.token_end is None or self.duration_ms is None):
            raise ValueError("a pin needs token_end and duration_ms")
        if self.pin and self.priority != DEFAULT_PRIORITY:
            raise ValueError("a pinned range has no priority; leave priority out")
        if not self.pin and self.priority == DEFAULT_PRIORITY and self.duration_ms is None:
            raise ValueError(
                f"the range has no effect; give duration_ms, pin, or a priority other than {DEFAULT_PRIORITY}"
            )

    def make_directive(self) -> RetentionDirective:
        """Return the directive."""
        return RetentionDirective(
            self.token_start, self.token_end, self.priority, _as_seconds(self.duration_ms), self.pin
        )


class SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep the request's blocks for the next turn of its conversation; see `BlockRetention.keep_session`.

    Without an id, the request's own `session_id` is used.
    """

    duration_ms: DurationMs
    id: SessionId | None = None
    priority: Priority = MAX_PRIORITY

    def __post_init__(self) -> None:
        if self.id is not None:
            _check_text("id", self.id)


class KnownHints(msgspec.Struct, frozen=True):
    """The hints that the included cache policies read, with their types and bounds.

    Attributes:
        session_id: the conversation, if the request has no `session_id`.
        tenant, category: of the workload, such as the application.
        ttl_s: seconds until the next turn is expected, such as a tool's answer.
        budget_tokens: tokens that the next turn may recompute.
    """

    session_id: SessionId | None = None
    tenant: SessionId | None = None
    category: SessionId | None = None
    ttl_s: Annotated[float, Meta(ge=0, le=MAX_DURATION_MS / 1000)] = 0.0
    budget_tokens: Token = 0


Hints = Annotated[dict[HintName, Hint], Meta(min_length=1, max_length=MAX_HINTS)]
Ranges = Annotated[list[TokenRange], Meta(min_length=1, max_length=MAX_RANGES)]
Retentions = Annotated[list[TokenRangeRetention], Meta(min_length=1, max_length=MAX_RANGES)]


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `kv_pool` object of a request.

    Attributes:
        token_range_retention_configs: for this request's blocks, from its end on.
        decode_retention_priority, decode_duration_ms: the same for its generated tokens.
        session: keep its blocks for the next turn.
        change: replace the directives on the cached blocks of this prompt now, from whichever request they
            come.
        demote: evict the blocks of these ranges before others: cached blocks of the prompt now, and this
            request's own from its end on; true: of all its tokens.
        release: remove the directives and pins of these ranges; true: of the whole prompt.
        end_session: end this session now.
        hints: for the cache policy, see `KnownHints`; a policy may read others.
    """

    token_range_retention_configs: Retentions | None = None
    decode_retention_priority: Priority | None = None
    decode_duration_ms: DurationMs | None = None
    session: SessionOptions | None = None
    change: Retentions | None = None
    demote: bool | Ranges = False
    release: bool | Ranges = False
    end_session: SessionId | None = None
    hints: Hints | None = None

    def __post_init__(self) -> None:
        if self.hints is not None:
            _check_hints(self.hints)
        if self.end_session is not None:
            _check_text("end_session", self.end_session)
        if self.decode_duration_ms is not None and self.decode_retention_priority is None:
            raise ValueError("decode_duration_ms needs decode_retention_priority")

    def list_directives(self, num_prompt_tokens: int) -> list[RetentionDirective]:
        """Return the directives for the request's own blocks.

        Those of `demote` are among them: the request computes its last prompt block again, in another block.
        """
        directives = [one.make_directive() for one in self.token_range_retention_configs or ()]
        directives += self._list_demotions()
        if self.decode_retention_priority is not None:
            duration_s = _as_seconds(self.decode_duration_ms)
            directives.append(
                RetentionDirective(num_prompt_tokens, None, self.decode_retention_priority, duration_s)
            )
        return directives

    def list_changes(self) -> list[RetentionDirective]:
        """Return the directives that replace those on the cached blocks of the prompt.

        On a block that several of the fields name, `change` and `demote` apply, and `release` does not.
        """
        changes = [RetentionDirective(one.token_start, one.token_end) for one in _list_ranges(self.release)]
        changes += self._list_demotions()
        return changes + [one.make_directive() for one in self.change or ()]

    def _list_demotions(self) -> list[RetentionDirective]:
        return [
            RetentionDirective(one.token_start, one.token_end, priority=0)
            for one in _list_ranges(self.demote)
        ]


def read_options(value: Any) -> RequestOptions:
    """Decode the `kv_pool` object of a request: a dict, or JSON text.

    Raises:
        InvalidArgumentError: unknown fields, wrong types, numbers out of bounds, or ranges without effect.
            The message names the field; it is printable ASCII of at most 400 characters.
    """
    if isinstance(value, str | bytes) and len(value) > MAX_TEXT:
        raise InvalidArgumentError(
            f"kv_pool: the text has {len(value)} characters; at most {MAX_TEXT} are read"
        )
    try:
        if isinstance(value, str | bytes):
            return msgspec.json.decode(value, type=RequestOptions)
        return msgspec.convert(value, RequestOptions)
    except UNDECODABLE as error:
        raise InvalidArgumentError(make_refusal(error)) from None


def make_refusal(error: Exception) -> str:
    """Return an error's message for the client: printable ASCII of bounded length."""
    text = str(error).encode("ascii", "backslashreplace").decode("ascii")
    text = "".join([character if character.isprintable() else " " for character in text])
    if not text.startswith("kv_pool: "):
        text = f"kv_pool: {text}"
    return text if len(text) <= _MAX_MESSAGE else f"{text[: _MAX_MESSAGE - 3]}..."


def _as_seconds(duration_ms: int | None) -> float | None:
    return None if duration_ms is None else duration_ms / 1000


def _list_ranges(ranges: bool | list[TokenRange]) -> list[TokenRange]:
    if isinstance(ranges, bool):
        return [TokenRange()] if ranges else []
    return ranges


def _check_hints(hints: dict[str, bool | int | float | str]) -> None:
    """Refuse known hints of a wrong type, and values that a policy cannot compute with."""
    try:
        msgspec.convert(hints, KnownHints)
    except msgspec.ValidationError as error:
        raise ValueError(f"hints: {error}") from None
    for name, value in hints.items():
        _check_text("hints", name)
        if isinstance(value, str):
            _check_text(name, value)
        elif not abs(value) <= MAX_HINT:
            raise ValueError(f"hints: {name} is beyond {MAX_HINT}")


def _check_text(field: str, text: str) -> None:
    """Refuse text that the client's answer could not repeat."""
    if not text.isprintable():
        raise ValueError(f"{field} has characters that cannot be printed")


FIELD: Final = "kv_pool"
"""The name of the object."""

ABSENT: Final = object()
"""The result for a request without the object."""

_CANNOT_RETAIN: Final = (
    "this engine runs vLLM's KV cache manager, which cannot retain; the operator enables retention with "
    f"VLLM_PLUGINS=kv_pool and {LEVEL}=manager, and the log names what level manager does not serve"
)
NO_MANAGER: Final = f"kv_pool: {_CANNOT_RETAIN}"
"""Why the options of all requests are refused under vLLM's own manager."""


def list_places(extra_args: Any) -> dict[str, Any]:
    """Return the `kv_pool` objects in vLLM's `SamplingParams.extra_args`, undecoded, by their places.

    vLLM's API server puts a request's `vllm_xargs` there, and its `kv_transfer_params` under that name. The
    object may be in either; in `vllm_xargs` it is JSON text, because vLLM accepts no nested objects there.
    """
    if not isinstance(extra_args, dict):
        return {}
    return _list_places(extra_args=extra_args, kv_transfer_params=extra_args.get("kv_transfer_params"))


def list_places_in_body(body: Any) -> dict[str, Any]:
    """Return the `kv_pool` objects in the JSON of a request to vLLM's API server; see `list_places`."""
    if not isinstance(body, dict):
        return {}
    return _list_places(vllm_xargs=body.get("vllm_xargs"), kv_transfer_params=body.get("kv_transfer_params"))


def _list_places(**fields: Any) -> dict[str, Any]:
    return {
        f"{name}[{FIELD!r}]": value[FIELD]
        for name, value in fields.items()
        if isinstance(value, dict) and FIELD in value
    }


def find_options(places: dict[str, Any]) -> Any:
    """Return the `kv_pool` object of a request, undecoded; `ABSENT` without one.

    Raises:
        InvalidArgumentError: it is in both places.
    """
    if len(places) > 1:
        raise InvalidArgumentError(
            "kv_pool: sent in kv_transfer_params and in vllm_xargs; send it in one of them"
        )
    return next(iter(places.values()), ABSENT)


def warn_of_unread_options(request: Any) -> None:
    """Warn if a request has options, which this engine does not read; once for each place of theirs."""
    params = getattr(request, "sampling_params", None)
    places = () if params is None else list_places(params.extra_args)
    for place in places:
        warn(f"kv_pool ignores the options in {place}: {_CANNOT_RETAIN}")
