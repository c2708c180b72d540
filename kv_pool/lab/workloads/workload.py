"""`generate_requests`: sessions that arrive at random, each a sequence of requests."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, count, islice
from typing import Annotated, Any, NamedTuple

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.workloads.distributions import (
    Distribution,
    RandomStream,
    ZipfSampler,
    portable_exp,
    portable_gamma,
    portable_log,
)
from kv_pool.option import Option, check_options, describe_options, setting

SIZE_PANEL = "Size"
MAX_TOKENS = 16_000_000


def distribute(text: str, *, default: Distribution) -> Any:
    """Return a field of settings that is a distribution."""
    return setting(text, default=default, metavar="DISTRIBUTION", parse=Distribution.parse)


class GeneratedRequest(msgspec.Struct, frozen=True):
    """One line of a generated trace: the fields of `schemas/trace_line.schema.json`."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    session_id: int


@describe_options
@dataclass(frozen=True, kw_only=True)
class WorkloadSettings:
    """The settings that all workloads have. The help of each names the source of its default.

    Attributes:
    """

    num_requests: Annotated[
        int, Option("Number of requests.", name="requests", min=1, metavar="N", panel=SIZE_PANEL)
    ]
    seed: int = setting("The same seed gives the same trace.", default=0, metavar="N", panel=SIZE_PANEL)
    block_size: int = setting("Tokens per hash id.", default=64, min=1, panel=SIZE_PANEL)
    max_tokens: int = setting(
        "Maximum length of a prompt. A conversation that would exceed it ends, or is compacted. "
        "Default: the longest prompts of the shared chat trace have 126,195 tokens.",
        default=128_000,
        min=1,
        panel=SIZE_PANEL,
    )
    sessions_per_s: float = setting("Sessions that start per second, on average.", default=1.0)
    arrival_shape: float = setting(
        "Shape of the Weibull distribution of the gaps between the starts of sessions: 1 is a Poisson "
        "process, and less is more bursty; gaps of production traffic are Weibull or Gamma (Xiang et "
        "al., ServeGen, 2025). Default: a choice.",
        default=1.0,
    )
    system_prompts: int = setting(
        "Number of system prompts. Default: all requests of a service share one.", default=1, min=1
    )
    system_skew: float = setting(
        "Zipf exponent of the popularity of system prompts. Default: a choice.", default=1.0, min=0.0
    )
    system_tokens: Distribution = distribute("Tokens of a system prompt.", default=Distribution("fixed", 768))

    def check(self) -> None:
        """Raise InvalidArgumentError if a value is out of range."""
        check_options(self)
        if not 0 < self.sessions_per_s <= 1e6:
            raise InvalidArgumentError(
                f"sessions_per_s is {self.sessions_per_s}; it must be above 0 and at most a million"
            )
        if not 0.1 <= self.arrival_shape <= 10:
            raise InvalidArgumentError(f"arrival_shape is {self.arrival_shape}; it must be in 0.1..10")
        if self.max_tokens > MAX_TOKENS:
            raise InvalidArgumentError(
                f"max_tokens is {self.max_tokens:,}; it must be at most {MAX_TOKENS:,}"
            )


class GrowingPrompt:
    """A prompt of text that other prompts share, followed by text of its own.

        shared       |  own text                        |
        0    1    2  |   17    18    19   ...           |  one id for each full block
                   ^ a block that ends in own text has an id of its own

    Args:
        fresh: yields ids that no other block has.

    Attributes:
        ids: the ids of its full blocks, head first.
        num_tokens: its length.
    """

    __slots__ = ("_block_size", "_fresh", "ids", "num_tokens")

    def __init__(self, fresh: Iterator[int], block_size: int) -> None:
        self._fresh = fresh
        self._block_size = block_size
        self.ids: list[int] = []
        self.num_tokens = 0

    def append_shared(self, num_tokens: int, first_id: int) -> None:
        """Append text that is equal in all prompts with the same text before it.

        Args:
            first_id: id of the first block that ends in this text; the next ones follow it.
        """
        self.num_tokens += num_tokens
        num_new = self.num_tokens // self._block_size - len(self.ids)
        self.ids.extend(range(first_id, first_id + num_new))

    def append_own(self, num_tokens: int) -> None:
        """Append text that no other prompt has."""
        self.num_tokens += num_tokens
        self.ids.extend(islice(self._fresh, self.num_tokens // self._block_size - len(self.ids)))

    def append_own_within(self, num_tokens: int, max_tokens: int) -> None:
        """Append as `append_own`, less if the prompt would exceed `max_tokens`, but at least one token."""
        self.append_own(max(1, min(num_tokens, max_tokens - self.num_tokens)))


class Turn(NamedTuple):
    """A request of a session: the seconds since the one before, its prompt, and the tokens of its answer."""

    pause_s: float
    prompt: GrowingPrompt
    num_output: int


Session = Iterator[Turn]
"""The requests of a session, of which there is one or more. The prompt of the last one may grow for the next.

A generator, so that each request is drawn from the random stream when the one before has arrived.
"""


class SystemPrompts:
    """The system prompts of a workload: their lengths, ids and popularity."""

    def __init__(self, settings: WorkloadSettings, stream: RandomStream) -> None:
        self._settings = settings
        self._stream = stream
        self._zipf = ZipfSampler(settings.system_prompts, settings.system_skew)
        drawn = (settings.system_tokens.sample_count(stream, 0) for _ in range(settings.system_prompts))
        self._lengths = [min(length, settings.max_tokens) for length in drawn]
        num_full = (length // settings.block_size for length in self._lengths)
        self._first_ids = list(accumulate(num_full, initial=0))
        self._fresh = count(self._first_ids[-1])

    def choose(self) -> int:
        """Return the number of a random system prompt."""
        return self._zipf.take_rank(self._stream)

    def begin(self, number: int) -> GrowingPrompt:
        """Return a prompt that consists of system prompt `number`."""
        prompt = GrowingPrompt(self._fresh, self._settings.block_size)
        prompt.append_shared(self._lengths[number], self._first_ids[number])
        return prompt


def generate_requests(
    settings: WorkloadSettings, start_session: Callable[[], Session], stream: RandomStream
) -> Iterator[GeneratedRequest]:
    """Yield the first `settings.num_requests` requests, in the order of arrival.

    Args:
        start_session: returns a new session.

    Memory: the sessions that are not over, and 8 bytes per document or system prompt.
    """
    # (arrival in seconds, tie-breaker, session id, request, session); a session begins without a request.
    arrivals: list[tuple[float, int, int, Turn | None, Session]] = [(0.0, 0, 0, None, start_session())]
    num_pushed = 0
    # A Weibull gap is an exponential one to a power, scaled so that the mean is 1 / sessions_per_s.
    power = 1.0 / settings.arrival_shape
    scale_s = 1.0 / (settings.sessions_per_s * portable_gamma(1.0 + power))
    if settings.arrival_shape == 1.0:
        scale_s = 1.0 / settings.sessions_per_s
    for _ in range(settings.num_requests):
        now_s, _, session_id, turn, session = heapq.heappop(arrivals)
        if turn is None:
            turn = next(session)
            num_pushed += 1
            gap = stream.take_exponential()
            if power != 1.0 and gap:
                gap = portable_exp(power * portable_log(gap))
            heapq.heappush(
                arrivals, (now_s + gap * scale_s, num_pushed, session_id + 1, None, start_session())
            )
        prompt = turn.prompt
        yield GeneratedRequest(
            int(now_s * 1000), prompt.num_tokens, turn.num_output, list(prompt.ids), session_id
        )
        turn = next(session, None)
        if turn is not None:
            num_pushed += 1
            heapq.heappush(arrivals, (now_s + turn.pause_s, num_pushed, session_id, turn, session))
