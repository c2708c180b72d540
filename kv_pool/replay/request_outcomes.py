"""`RequestOutcome`: the result of one request in a replay; writes outcomes as JSON lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from kv_pool.errors import TraceError


class RequestOutcome(msgspec.Struct):
    """The result of one request in a replay.

    Attributes:
        line: the request's line in the trace, from 1.
        outcome: "done", or "refused" if it would not fit into the empty pool.
        session_id: as in the trace.
        arrival_ms: arrival on the replay's clock; with the trace clock, after applying `speedup`.
        end_ms: the time when its last token was generated (trace clock), or its arrival.
        input_length, output_length: tokens, as in the trace.
        tokens_out: generated tokens; 0 with the instant clock, which computes prompts only.
        blocks: blocks in its tables at its end, of all groups, without null blocks.
        blocks_looked_up: full blocks of its prompt.
        blocks_hit, tokens_hit: hits at its first admission, on the device or in a lower tier.
        tokens_hit_in_tiers: the part of `tokens_hit` found in lower tiers.
        waited_ms: waiting time before admission and after each preemption (trace clock).
        preempted: number of preemptions (trace clock).
        tenant: as in the trace.
        turn: its number among the requests of its session, from 1; None without a session.
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
    tenant: str | None = None
    turn: int | None = None


OutcomeCallback = Callable[[RequestOutcome], None]


@contextmanager
def write_outcomes(path: str) -> Iterator[OutcomeCallback]:
    """Create the file `path` and yield a callback that writes each outcome to it as a line of JSON.

    The callback raises no errors: after a failure, such as a full disk, it stops writing and the replay
    continues.

    Raises:
        TraceError: the file cannot be created; or, at the end of the `with` block, it is incomplete.
    """
    encode = msgspec.json.Encoder().encode
    failure: OSError | None = None
    try:
        file = open(path, "wb")  # noqa: SIM115, closed below
    except OSError as error:
        raise TraceError(f"{path}: cannot write the requests: {error.strerror}") from error

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
            f"{path}: cannot write the requests: {failure.strerror}; the file is truncated, the replay is "
            f"complete"
        ) from failure
