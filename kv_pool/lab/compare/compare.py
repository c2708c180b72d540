"""`compare_policies`: runs a comparison of cache policies on any executor, and keeps its finished runs."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from kv_pool.error_names import ERRORS_BY_NAME
from kv_pool.errors import KVPoolError
from kv_pool.lab.compare.comparison import CompareSettings, Comparison, PolicyRecord
from kv_pool.lab.compare.measuring import compare_trace, list_contradictions
from kv_pool.lab.compare.policy_run import (
    Failure,
    Origin,
    PolicyRun,
    PolicySource,
    attempt,
    read_source,
    run_policy,
)
from kv_pool.lab.compare.references import References, measure_references
from kv_pool.lab.report import OnProgress, make_provenance
from kv_pool.lab.trace_writer import writing
from kv_pool.lab.worker_processes import run_jobs
from kv_pool.version import __version__

Result = PolicyRun | References


class _Line(msgspec.Struct, frozen=True):
    """A line of the file. The key is a digest of all that decides the result."""

    key: str
    result: Result


def _read_finished(path: str) -> dict[str, Result]:
    """Return the results in a file of JSON lines by their keys, and create the file if it does not exist.

    Lines that cannot be read, such as a truncated last one, count as not finished. Raises TraceError.
    """
    decode = msgspec.json.Decoder(_Line).decode
    results: dict[str, Result] = {}
    with writing(path, "finished runs"), open(path, "a+b") as file:
        file.seek(0)
        text = file.read()
        for line in text.splitlines():
            with suppress(msgspec.MsgspecError, RecursionError):
                found = decode(line)
                results[found.key] = found.result
        if text and not text.endswith(b"\n"):
            file.write(b"\n")
    return results


def _append_finished(path: str, key: str, result: Result) -> None:
    """Append a result to a file of finished runs. Raises TraceError."""
    with writing(path, "finished runs"), open(path, "ab") as file:
        file.write(msgspec.json.encode(_Line(key, result)) + b"\n")


_REFERENCES = "the optimum"


@dataclass(frozen=True)
class _Job:
    """A call for a worker. `key` is a digest of all that decides its result."""

    place: tuple[int, str, int]  # number of the trace, policy, capacity
    label: str
    key: str
    call: Callable[[], Result | Failure]


def compare_policies(
    settings: CompareSettings,
    executor: Executor,
    finished: str | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Replay each trace with each policy at each capacity, and compare them with LRU and the optimum.

    The workers of the executor need kv_pool in this version, and each trace under the same path with the same
    content. Policies from files are sent as text.

    Args:
        settings: what to compare.
        executor: any `concurrent.futures.Executor`, such as `WorkerProcesses`.
        finished: a file to which each finished run is appended. A later call reads it and goes on; changed
            traces, policies, settings and versions of kv_pool are run again. Deleted when all runs are
            finished.
        on_progress: called in this thread, for each run that ends, with its error if it fails, and a few
            times per second meanwhile.
    Returns:
        The results. A run that fails, for example because its policy is broken, has a row with its error.
    Raises:
        InvalidArgumentError: the settings are invalid, or a policy cannot be found.
        TraceError: a trace cannot be read, or `finished` not be written.
        WorkerLostError: the worker that computed the optimum of a trace ended before.
    """
    settings.check()
    sources = [read_source(name) for name in settings.list_policies()]
    traces = [compared.settings.open_trace() for compared in settings.traces]
    digests = [trace.digest() for trace in traces]
    jobs = list(_list_jobs(settings, sources, digests))
    results = _run_all(jobs, executor, finished, on_progress)
    if finished is not None and not any(isinstance(result, Failure) for result in results.values()):
        with suppress(OSError):
            os.unlink(finished)
    found = []
    contradictions: list[str] = []
    for number, compared in enumerate(settings.traces):
        references = results[number, _REFERENCES, 0]
        if isinstance(references, Failure):
            raise ERRORS_BY_NAME.get(references.error, KVPoolError)(
                f"no optimum of {compared.settings.trace}: {references.message} {references.traceback}"
            )
        of_trace: dict[tuple[str, int], PolicyRun | Failure] = {
            (policy, num_blocks): result
            for (place, policy, num_blocks), result in results.items()
            if place == number and policy != _REFERENCES
        }
        trace, seed = traces[number], compared.settings.seed
        provenance = make_provenance(trace, digests[number], seed)
        contradictions += list_contradictions(compared, references, of_trace, provenance.trace)
        found.append(compare_trace(settings, compared, references, of_trace, provenance))
    records = [PolicyRecord(source.name, source.sha256) for source in sources]
    return Comparison(settings, records, found, contradictions)


def _list_jobs(settings: CompareSettings, sources: list[PolicySource], digests: list[str]) -> Iterator[_Job]:
    """Yield the jobs of all traces, those that compute the optimum first: each takes longest."""
    for number, (compared, digest) in enumerate(zip(settings.traces, digests, strict=True)):
        key = _make_key(_REFERENCES, digest, replace(compared.settings, trace=""), compared.capacities)
        label = f"{_REFERENCES}, {compared.settings.trace}"
        measure = partial(measure_references, compared, Origin(digest))
        yield _Job((number, _REFERENCES, 0), label, key, partial(attempt, measure))
    for number, (compared, digest) in enumerate(zip(settings.traces, digests, strict=True)):
        for num_blocks in compared.capacities:
            at = replace(compared.settings, num_blocks=num_blocks)
            for source in sources:
                key = _make_key(source.name, digest, replace(at, trace=""), source.sha256)
                label = f"{source.name} at {num_blocks:,} blocks, {compared.settings.trace}"
                run = partial(run_policy, at, source, Origin(digest))
                yield _Job((number, source.name, num_blocks), label, key, partial(attempt, run))


def _make_key(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode([__version__, *parts])).hexdigest()


def _run_all(
    jobs: list[_Job],
    executor: Executor,
    finished: str | None,
    on_progress: OnProgress | None,
) -> dict[tuple[int, str, int], Any]:
    """Return the result of each job by its place. Jobs in the file `finished` are not repeated."""
    known = {} if finished is None else _read_finished(finished)
    results: dict[tuple[int, str, int], Any]
    results = {job.place: known[job.key] for job in jobs if job.key in known}

    def note(job: _Job, future: "Future[Result | Failure]") -> str:
        ended = results[job.place] = attempt(future.result)  # the executor may fail, too
        if isinstance(ended, Failure):
            return f"{job.label}: {ended.describe()}"
        if finished is not None:
            _append_finished(finished, job.key, ended)
        return job.label

    calls = {job: job.call for job in jobs if job.place not in results}
    run_jobs(executor, calls, note, on_progress, len(results))
    return results
