"""How the benchmarks measure: options, samples in turn, tables, the provenance of figures, and results."""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

MAX_LOAD = 1.5
"""The load average above which no results are written, on a machine of two cores; more cores, more load."""
LOAD_AT_START = os.getloadavg()[0]
DISTRIBUTIONS = ("kv_pool", "vllm", "msgspec", "xxhash", "numpy")

One = TypeVar("One")
Options = argparse.Namespace
Sample = Callable[[], float]
"""A function that runs once and returns one measurement in its row's unit."""


# ---- options and results -------------------------------------------------------------------------


def make_parser(
    about: str | None, *, runs: int | None = None, seeded: bool = True
) -> argparse.ArgumentParser:
    """Return a parser with `--json`, and with `--runs` and `--seed` where they are wanted."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs, help="measured runs of each row")
    if seeded:
        parser.add_argument("--seed", type=int, default=0, help="seed of whatever is drawn")
    return parser


def read_options(parser: argparse.ArgumentParser, **quick: Any) -> Options:
    """Parse the command line.

    Args:
        quick: values of options with `--quick`, a smoke test. Without any there is no such option.
    Raises:
        SystemExit: with `--json`, if other programs are running: the load average is above `MAX_LOAD`.
            Results of `--quick`, which mean nothing, are written in any case.
    """
    if quick:
        parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    options = parser.parse_args()
    is_quick = bool(quick) and options.quick
    if is_quick:
        vars(options).update(quick)
    most = MAX_LOAD * max(1.0, (os.cpu_count() or 1) / 2)
    if options.json is not None and not is_quick and most < LOAD_AT_START:
        parser.error(
            f"no results are written to {options.json}: the load average is {LOAD_AT_START:.1f}, and above "
            f"{most:.1f} figures depend on other programs. Stop them or wait a minute, or run without --json"
        )
    return options


def write_results(options: Options, results: Mapping[str, Any]) -> None:
    """Write results as JSON to the file of `--json`, if it was given."""
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


# ---- provenance ----------------------------------------------------------------------------------


def describe_core() -> str:
    """Return whether the installed kv_pool is `compiled` or `plain`."""
    from kv_pool import COMPILED  # here, since one script imports the plain package first

    return "compiled" if COMPILED else "plain"


def start_run(options: Options, *distributions: str, **more: Any) -> dict[str, Any]:
    """Print and return the provenance of figures: command, date, machine, versions, options.

    Args:
        distributions: whose versions matter here, beside `DISTRIBUTIONS`.
        more: facts of this script.
    """
    provenance: dict[str, Any] = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": find_cpu_model(),
        "cores": os.cpu_count(),
        "load_average_at_start": LOAD_AT_START,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in (*DISTRIBUTIONS, *distributions)},
        "core": describe_core(),
        "options": {name: str(value) for name, value in vars(options).items() if name != "json"},
        **more,
    }
    for name, value in provenance.items():
        if isinstance(value, dict):
            value = [f"{key} {one}" for key, one in value.items()]
        print(f"{name:22}{', '.join(value) if isinstance(value, list) else value}")
    print(flush=True)
    return provenance


def find_cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# ---- samples and rows ----------------------------------------------------------------------------


@dataclass
class Row:
    """A row of results: the measurements of each implementation, in `unit`.

    Attributes:
        base: the implementation with which the others are compared, if it was measured.
    """

    title: str
    unit: str
    samples: dict[str, list[float]]
    base: str | None = None

    def get_ratio(self, name: str) -> float | None:
        """Return the base's median divided by this one, and of rates (`.../s`) this one divided by it.

        None without a base, or if one of the two prints as 0.00.
        """
        if self.base is None or self.base not in self.samples:
            return None
        median, theirs = (summarize(self.samples[one])[1] for one in (name, self.base))
        if min(median, theirs) < 0.005:
            return None
        return median / theirs if self.unit.endswith("/s") else theirs / median

    def print(self) -> None:
        print(self.title)
        for name, samples in self.samples.items():
            low, median, high = summarize(samples)
            ratio = self.get_ratio(name)
            numbers = "".join(
                f"{number:>12,.{2 if abs(number) < 100 else 0}f}" for number in (median, low, high)
            )
            shown = "" if self.base is None else "-" if ratio is None else f"{ratio:.2f}"
            print(f"    {name:34}{self.unit:>14}{numbers}{len(samples):>6}{shown:>20}", flush=True)

    def to_json(self) -> dict[str, Any]:
        figures: dict[str, dict[str, float | None]] = {}
        for name, samples in self.samples.items():
            low, median, high = summarize(samples)
            figures[name] = {"median": median, "p10": low, "p90": high, "runs": len(samples)}
            figures[name] |= {} if self.base is None else {"ratio": self.get_ratio(name)}
        return {"title": self.title, "unit": self.unit, "figures": figures, "samples": self.samples}


def print_header(ratio: str = "") -> None:
    """Print the columns of `Row.print`; `ratio` is the title of the last one."""
    print(f"{'':38}{'unit':>14}{'median':>12}{'p10':>12}{'p90':>12}{'runs':>6}{ratio:>20}")


def in_turn(ones: Sequence[One], turn: int) -> list[One]:
    """Return all of them, from another one on at each turn."""
    shift = turn % len(ones)
    return [*ones[shift:], *ones[:shift]]


@contextmanager
def gc_off(*, frozen: bool = False) -> Iterator[None]:
    """Collect all garbage now and none inside; `frozen` as vLLM's engine is after start-up."""
    gc.collect()
    if frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if frozen:
            gc.unfreeze()


def interleave(
    title: str, unit: str, samples: Mapping[str, Sample], runs: int, base: str | None = None
) -> Row:
    """Take one sample of each in turn, `runs` times after a warm-up, with GC off."""
    row = Row(title, unit, {name: [] for name in samples}, base)
    with gc_off():
        for run in range(-1, runs):
            for name in in_turn(list(samples), run):
                measured = samples[name]()
                if run >= 0:
                    row.samples[name].append(measured)
    return row


def summarize(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return p10, median and p90."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return deciles[0], statistics.median(samples), deciles[8]


def time_ms(call: Callable[[], object], prepare: Callable[[], object] | None = None) -> Sample:
    """Return a sample of the milliseconds of `call`, without its preparation."""

    def sample() -> float:
        if prepare is not None:
            prepare()
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    return sample


def timed(times_us: list[float], call: Callable[..., Any], *arguments: Any) -> Any:
    """Call, and append the microseconds of processor time, which other work on a machine does not affect."""
    start = time.thread_time_ns()
    answer = call(*arguments)
    times_us.append((time.thread_time_ns() - start) / 1e3)
    return answer


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (second field of Linux's statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_cpu_s(process_id: int) -> float:
    """Return the user and system time of a process so far, in seconds; Linux counts them in hundredths."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_child(*arguments: str) -> Any:
    """Run Python in a new interpreter. Return the JSON in its last line of output."""
    command = [sys.executable, *arguments]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(answer.splitlines()[-1])
