"""`RequestOutcome`: one request of a replay. `Breakdown`: hit rates by session, turn, minute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec

from kv_pool.errors import InvalidArgumentError, TraceError, describe_known
from kv_pool.lab.trace_writer import writing


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
    with writing(path, "the requests"):
        file = open(path, "wb")  # noqa: SIM115, closed below

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


BREAKDOWNS = ("session", "turn", "tenant", "minute", "position")
"""The properties by which `Breakdown` groups the requests of a replay.

    session    the conversation
    turn       1 for the first request of a conversation, 2 for the second, and so on
    tenant     the trace that it comes from, in a merged trace
    minute     the minute of its arrival, from 0
    position   the place in the prompt: first tokens 0, 1024, 2048, 4096 and so on; here a request is in
               several groups, each with the tokens of that part of the prompt
"""

_FIRST_POSITION = 1024
_NO_END = 1 << 62
_MS_PER_MINUTE = 60_000

_Key = str | int | None


class BreakdownRow(msgspec.Struct):
    """The hits of one group of requests.

    Attributes:
        key: session, turn, tenant, minute, or the first token of a range of positions; None for requests
            without session or tenant.
        requests, refused_requests: requests in the group.
        tokens_in, blocks_looked_up: prompt tokens, and full prompt blocks.
        tokens_hit, blocks_hit: hits at the first admission, on the device or in a lower tier.
        tokens_hit_in_tiers: the part of `tokens_hit` found in lower tiers.
        token_hit_rate, block_hit_rate: hits as shares.
    """

    key: _Key
    requests: int = 0
    refused_requests: int = 0
    tokens_in: int = 0
    tokens_hit: int = 0
    tokens_hit_in_tiers: int = 0
    blocks_looked_up: int = 0
    blocks_hit: int = 0
    token_hit_rate: float = 0.0
    block_hit_rate: float = 0.0


def parse_breakdowns(text: str) -> tuple[str, ...]:
    """Return the kinds in a list such as `turn,minute`. Raises InvalidArgumentError."""
    kinds = tuple(dict.fromkeys(kind.strip() for kind in text.split(",") if kind.strip()))
    for kind in kinds:
        if kind not in BREAKDOWNS:
            raise InvalidArgumentError(f"unknown --by {kind!r}; {describe_known(kind, BREAKDOWNS)}")
    return kinds


class Breakdown:
    """Adds up the outcomes of requests by group.

    Args:
        kind: one of `BREAKDOWNS`.
        block_size: tokens per pool block.

    Memory: one row per group.
    """

    def __init__(self, kind: str, block_size: int) -> None:
        self.kind = kind
        self._block_size = block_size
        self._rows: dict[_Key, BreakdownRow] = {}

    def add(self, outcome: RequestOutcome) -> None:
        """Count a request that ended or was refused."""
        if self.kind == "position":
            first, end = 0, _FIRST_POSITION
            while first < outcome.input_length:
                self._add_part(first, outcome, first, end)
                first, end = end, 2 * end
        else:
            keys: dict[str, _Key] = {
                "session": outcome.session_id,
                "turn": outcome.turn,
                "tenant": outcome.tenant,
                "minute": int(outcome.arrival_ms // _MS_PER_MINUTE),
            }
            self._add_part(keys[self.kind], outcome, 0, _NO_END)

    def _add_part(self, key: _Key, outcome: RequestOutcome, first: int, end: int) -> None:
        """Count the tokens `first` to `end` - 1 of a prompt. A block is in the part in which it begins."""
        row = self._rows.setdefault(key, BreakdownRow(key))
        row.requests += 1
        row.refused_requests += outcome.outcome == "refused"
        row.tokens_in += _overlap(outcome.input_length, first, end)
        num_hit = _overlap(outcome.tokens_hit, first, end)
        row.tokens_hit += num_hit
        num_on_device = outcome.tokens_hit - outcome.tokens_hit_in_tiers
        row.tokens_hit_in_tiers += num_hit - _overlap(num_on_device, first, end)
        first_block, end_block = -(-first // self._block_size), -(-end // self._block_size)
        row.blocks_looked_up += _overlap(outcome.blocks_looked_up, first_block, end_block)
        row.blocks_hit += _overlap(outcome.blocks_hit, first_block, end_block)

    def finish(self) -> list[BreakdownRow]:
        """Return the rows with their rates.

        Turns, minutes and positions are in order, and those without a key are last; sessions and tenants are
        in the order in which their first requests ended.
        """
        for row in self._rows.values():
            row.token_hit_rate = row.tokens_hit / row.tokens_in if row.tokens_in else 0.0
            row.block_hit_rate = row.blocks_hit / row.blocks_looked_up if row.blocks_looked_up else 0.0
        if self.kind in ("session", "tenant"):
            return list(self._rows.values())
        return sorted(self._rows.values(), key=lambda row: (row.key is None, row.key or 0))


def _overlap(length: int, first: int, end: int) -> int:
    """Return how many of the numbers 0 to `length` - 1 are in `first` to `end` - 1."""
    return max(0, min(length, end) - first)
