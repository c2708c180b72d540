"""`run_policy`: replays a trace with one policy at one capacity, in any process that has the policy."""

import hashlib
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_pool.core.policy_names import PolicyChoice, find_file, find_policy, read_file, read_policy_text
from kv_pool.errors import InvalidArgumentError, KVPoolError, TraceError
from kv_pool.lab.compare.comparison import LRU
from kv_pool.lab.request_outcomes import RequestOutcome
from kv_pool.lab.settings import OPTIMUM, ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.worker_processes import report_share
from kv_pool.version import __version__

_Result = TypeVar("_Result")


class PolicyRun(msgspec.Struct, frozen=True, tag="run"):
    """The results of one policy at one capacity.

    Attributes:
        blocks_hit, tokens_hit, evictions: as in `ReplayReport`.
        admitted: prompt blocks that were computed and cached: all that were looked up and not hit, except
            those of refused requests.
        seconds: duration of the replay.
        hits: block hits and token hits of each request, in the order of the trace, packed.
    """

    blocks_hit: int
    tokens_hit: int
    evictions: int
    admitted: int
    seconds: float
    hits: bytes


class PolicySource(msgspec.Struct, frozen=True):
    """A cache policy that another process can load.

    Attributes:
        name: as in `find_policy`.
        text: the text of the file of a policy `file.py:Class`, which other processes need not have.
        sha256: SHA-256 of the text of its file or module; None for policies of kv_pool, and for modules
            without source text.
    """

    name: str
    text: str | None = None
    sha256: str | None = None

    def load(self) -> PolicyChoice:
        """Return the policy.

        Raises:
            InvalidArgumentError: there is none, it cannot be imported, or its module has another text here.
        """
        if self.text is not None:
            return read_policy_text(self.name, self.text)
        found = find_policy(self.name)
        here = _digest_module(found)
        if here != self.sha256:
            raise InvalidArgumentError(
                f"the module of the cache policy {self.name!r} has another text in this process: SHA-256 "
                f"{here}, not {self.sha256}; install the same version on all workers"
            )
        return found


def read_source(name: str) -> PolicySource:
    """Return the source of a policy. Raises InvalidArgumentError if it cannot be found or imported."""
    path = find_file(name)
    if path is None:
        return PolicySource(name, sha256=_digest_module(find_policy(name, (OPTIMUM,))))
    text = read_file(path, name)
    read_policy_text(name, text)
    return PolicySource(name, text, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest())


def _digest_module(policy: PolicyChoice) -> str | None:
    name = getattr(policy.make, "__module__", "")
    if name.split(".")[0] == "kv_pool":
        return None
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or not path.endswith(".py"):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def attempt(call: Callable[[], _Result]) -> _Result | Failure:
    """Return what a call returns. Any error is a `Failure`, so that it reaches the caller unchanged."""
    try:
        return call()
    except Exception as error:
        is_ours = isinstance(error, KVPoolError)
        where = "" if is_ours else "".join(traceback.format_exception(error))
        return Failure(type(error).__name__, str(error), where)


def run_policy(settings: ReplaySettings, source: PolicySource, origin: Origin) -> PolicyRun:
    """Replay a trace with one policy.

    Args:
        settings: with the capacity.
        source: the policy.
        origin: what this process must have in common with the caller.
    """
    origin.check_version()
    policy = None if source.name == LRU else source.load()
    outcomes: list[tuple[int, int, int]] = []
    admitted = 0

    def note(outcome: RequestOutcome) -> None:
        nonlocal admitted
        outcomes.append((outcome.line, outcome.blocks_hit, outcome.tokens_hit))
        if outcome.outcome != "refused":
            admitted += outcome.blocks_looked_up - outcome.blocks_hit

    report = run_replay(replace(settings, policy=LRU), report_share, on_outcome=note, policy=policy)
    assert report.provenance is not None
    origin.check_trace(settings.trace, report.provenance.trace_sha256)
    outcomes.sort()  # requests end in another order than they arrive (trace clock)
    return PolicyRun(
        blocks_hit=report.blocks_hit,
        tokens_hit=report.tokens_hit,
        evictions=report.evictions,
        admitted=admitted,
        seconds=report.wall_seconds,
        hits=pack([(num_blocks, num_tokens) for _, num_blocks, num_tokens in outcomes]),
    )


def pack(counts: Sequence[int] | Sequence[tuple[int, int]]) -> bytes:
    """Compress counts, or pairs of counts."""
    return zlib.compress(np.asarray(counts, dtype="<i8").tobytes(), 6)


def unpack(packed: bytes, num_requests: int, num_columns: int = 1) -> NDArray[np.int64]:
    """Return packed counts as an array of shape (num_requests, num_columns).

    Raises:
        TraceError: the bytes do not have these counts.
    """
    try:
        counts = np.frombuffer(zlib.decompress(packed), dtype="<i8")
        return counts.reshape(num_requests, num_columns).astype(np.int64, copy=False)
    except (zlib.error, ValueError) as error:
        raise TraceError(
            f"the counts of {num_requests} requests are damaged ({error}); delete the file of finished runs"
        ) from error
