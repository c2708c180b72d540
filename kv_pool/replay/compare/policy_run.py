"""`run_policy`: replays a trace with one policy at one capacity, in any process."""

import traceback
from dataclasses import replace

import msgspec

from kv_pool.core.mode import COMPILED
from kv_pool.errors import InvalidArgumentError, KVPoolError, TraceError
from kv_pool.replay.compare.compare_settings import LRU
from kv_pool.replay.compare.packed_counts import pack
from kv_pool.replay.compare.policy_source import PolicySource
from kv_pool.replay.request_outcomes import RequestOutcome
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.simulator import run_replay
from kv_pool.version import __version__


class PolicyRun(msgspec.Struct, frozen=True, tag="run"):
    """The results of one policy at one capacity.

    Attributes:
        requests, refused_requests, blocks_looked_up, blocks_hit, tokens_in, tokens_hit, evictions: as in
            `ReplayReport`.
        admitted: prompt blocks that were computed and cached: all that were looked up and not hit, except
            those of refused requests.
        seconds: duration of the replay.
        compiled: whether the core was compiled.
        hits: block hits and token hits of each request, in the order of the trace, packed.
    """

    requests: int
    refused_requests: int
    blocks_looked_up: int
    blocks_hit: int
    tokens_in: int
    tokens_hit: int
    evictions: int
    admitted: int
    seconds: float
    compiled: bool
    hits: bytes


class Origin(msgspec.Struct, frozen=True):
    """The trace and the version with which a comparison was started. Its workers must have the same.

    Attributes:
        trace_sha256: SHA-256 of the trace.
        kv_pool: version of kv_pool.
    """

    trace_sha256: str
    kv_pool: str = __version__

    def check_version(self) -> None:
        """Raise InvalidArgumentError if this process has another version of kv_pool."""
        if self.kv_pool != __version__:
            raise InvalidArgumentError(
                f"this worker has kv_pool {__version__}, the comparison was started with {self.kv_pool}; "
                "install the same version on all workers"
            )

    def check_trace(self, path: str, sha256: str) -> None:
        """Raise TraceError if the trace in this process has another SHA-256."""
        if self.trace_sha256 != sha256:
            raise TraceError(
                f"{path}: the SHA-256 of the trace is {sha256} in this process and {self.trace_sha256} where "
                "the comparison started; the file has changed, or the worker has another file of this name"
            )


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """An error that ended a run.

    Attributes:
        error: name of the class.
        message: its text.
        traceback: where it was raised, if it is not an error of kv_pool; otherwise empty.
    """

    error: str
    message: str
    traceback: str = ""

    def describe(self) -> str:
        """Return the error in one line."""
        return f"{self.error}: {' '.join(self.message.split())}"


def make_failure(error: Exception) -> Failure:
    """Return an exception as a `Failure`."""
    name = type(error).__name__
    if isinstance(error, KVPoolError):
        return Failure(name, str(error))
    return Failure(name, str(error), "".join(traceback.format_exception(error)))


def run_policy(settings: ReplaySettings, source: PolicySource, origin: Origin) -> PolicyRun | Failure:
    """Replay a trace with one policy. Any error is a `Failure`, so that it reaches the caller unchanged.

    Args:
        settings: with the capacity.
        source: the policy.
        origin: what this process must have in common with the caller.
    """
    try:
        return _run(settings, source, origin)
    except Exception as error:
        return make_failure(error)


def _run(settings: ReplaySettings, source: PolicySource, origin: Origin) -> PolicyRun:
    origin.check_version()
    outcomes: list[tuple[int, int, int]] = []
    admitted = 0

    def note(outcome: RequestOutcome) -> None:
        nonlocal admitted
        outcomes.append((outcome.line, outcome.blocks_hit, outcome.tokens_hit))
        if outcome.outcome != "refused":
            admitted += outcome.blocks_looked_up - outcome.blocks_hit

    policy = None if source.name == LRU else source.load()
    report = run_replay(replace(settings, policy=LRU), on_outcome=note, policy=policy)
    assert report.provenance is not None
    origin.check_trace(settings.trace, report.provenance.trace_sha256)
    outcomes.sort()  # requests end in another order than they arrive (trace clock)
    return PolicyRun(
        requests=report.requests,
        refused_requests=report.refused_requests,
        blocks_looked_up=report.blocks_looked_up,
        blocks_hit=report.blocks_hit,
        tokens_in=report.tokens_in,
        tokens_hit=report.tokens_hit,
        evictions=report.evictions,
        admitted=admitted,
        seconds=report.wall_seconds,
        compiled=COMPILED,
        hits=pack([(num_blocks, num_tokens) for _, num_blocks, num_tokens in outcomes]),
    )
