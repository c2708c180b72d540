"""`RequestOutcome`: what a replay did with one request; and such outcomes as a file of JSON lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from kv_pool.errors import TraceError
from kv_pool.replay.replay_request import ReplayRequest


class RequestOutcome(msgspec.Struct):
    """What a replay did with one request.

    Attributes:
        line: the request's line in the trace, from 1.
        outcome: "done", or "refused" if it would not fit into the empty pool.
        session_id: as in the trace.
        arrival_ms: on the replay's clock. With the trace clock that is after `speedup`.
        end_ms: when its last token was generated (trace clock), or its arrival.
        input_length, output_length: tokens, as in the trace.
        tokens_out: generated; 0 with the instant clock, which computes prompts only.
        blocks: in its tables when it ended, of all groups, the null block not counted.
        blocks_looked_up: full blocks of its prompt.
        blocks_hit, tokens_hit: found cached when it was first admitted, on the device or in a tier.
        tokens_hit_in_tiers: of these tokens, those that tiers had.
        waited_ms: from arrival to admission, and after each preemption (trace clock).
        preempted: how often it lost its blocks to another request (trace clock).
    """

    line: int
    outcome: Literal["done", "refused"]
    session_id: str | None
    arrival_ms: float
    end_ms: float
    input_length: int
    output_length: int
    tokens_out: int = 0
    blocks: int = 0
    blocks_looked_up: int = 0
    blocks_hit: int = 0
    tokens_hit: int = 0
    tokens_hit_in_tiers: int = 0
    waited_ms: float = 0.0
    preempted: int = 0


OutcomeCallback = Callable[[RequestOutcome], None]


class OutcomeNotes:
    """Collects the outcomes of requests while they are replayed.

    Args:
        on_request: called with each outcome as it is known: in the order in which requests end.
    """

    def __init__(self, on_request: OutcomeCallback) -> None:
        self._on_request = on_request
        self._open: dict[str, RequestOutcome] = {}

    def arrive(self, request: ReplayRequest) -> None:
        """Note a request before anything is computed for it."""
        self._open[request.request_id] = RequestOutcome(
            line=int(request.request_id),
            outcome="done",
            session_id=request.session_id,
            arrival_ms=request.arrival_ms,
            end_ms=request.arrival_ms,
            input_length=request.input_length,
            output_length=request.num_output_left,
            blocks_looked_up=request.num_cacheable_blocks,
        )

    def refuse(self, request: ReplayRequest) -> None:
        """The request that has arrived never runs."""
        outcome = self._open.pop(request.request_id)
        outcome.outcome = "refused"
        self._on_request(outcome)

    def count_hit(
        self, request: ReplayRequest, num_blocks: int, num_tokens: int, num_tokens_in_tiers: int
    ) -> None:
        """Note the prefix with which the request was first admitted."""
        outcome = self._open[request.request_id]
        outcome.blocks_hit = num_blocks
        outcome.tokens_hit = num_tokens
        outcome.tokens_hit_in_tiers = num_tokens_in_tiers

    def count_preemption(self, request: ReplayRequest) -> None:
        """Note that the request has lost its blocks."""
        self._open[request.request_id].preempted += 1

    def end(self, request: ReplayRequest, num_blocks: int, waited_ms: float, end_ms: float) -> None:
        """The request has ended with `num_blocks` in its tables."""
        outcome = self._open.pop(request.request_id)
        outcome.tokens_out = request.num_tokens - request.num_prompt_tokens
        outcome.blocks = num_blocks
        outcome.waited_ms = waited_ms
        outcome.end_ms = end_ms
        self._on_request(outcome)


@contextmanager
def write_outcomes(path: str) -> Iterator[OutcomeCallback]:
    """A callback that writes each outcome as a line of JSON to the file `path`, which is made now.

    The callback raises nothing: after an error such as a full disk it writes no more, and the replay goes on.

    Raises:
        TraceError: the file cannot be made; or, at the end of the `with` block, it was not written whole.
    """
    encode = msgspec.json.Encoder().encode
    failure: OSError | None = None
    try:
        file = open(path, "wb")  # noqa: SIM115, closed below
    except OSError as error:
        raise TraceError(f"{path}: can not write the requests: {error.strerror}") from error

    def write(outcome: RequestOutcome) -> None:
        nonlocal failure
        if failure is None:
            try:
                file.write(encode(outcome) + b"\n")
            except OSError as error:
                failure = error

    try:
        yield write
    finally:
        try:
            file.close()
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise TraceError(
            f"{path}: can not write the requests: {failure.strerror}; the file is cut off, the replay is "
            f"whole"
        ) from failure
