"""How the benchmarks measure: interleaved samples, their summary, the provenance of figures, and results."""

import gc
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MAX_LOAD_PER_CORE = 0.75
"""The load average, by core, above which the figures of a run are not written."""
LOAD_AT_START = os.getloadavg()[0]

Sample = Callable[[], float]
"""A function that runs once and returns one measurement in its row's unit."""


@dataclass
class Row:
    """A row of results: the measurements of each implementation, in `unit`."""

    title: str
    unit: str
    samples: dict[str, list[float]]


def interleave(title: str, unit: str, samples: dict[str, Sample], runs: int) -> Row:
    """Take one sample of each in turn, `runs` times after a warm-up, with GC off."""
    row = Row(title, unit, {name: [] for name in samples})
    names = list(samples)
    gc.collect()
    gc.disable()
    try:
        for run in range(-1, runs):
            shift = run % len(names)
            for name in names[shift:] + names[:shift]:
                measured = samples[name]()
                if run >= 0:
                    row.samples[name].append(measured)
    finally:
        gc.enable()
    return row


def summarize(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return p10, median and p90."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return deciles[0], statistics.median(samples), deciles[8]


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (second field of Linux's statm, in pages)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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


DISTRIBUTIONS = ("kv_pool", "vllm", "msgspec", "xxhash", "numpy")


def describe_run(compared: Sequence[str], distributions: Sequence[str] = DISTRIBUTIONS) -> dict[str, Any]:
    """Return the provenance of figures: command, date, machine, versions, and what is compared."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": find_cpu_model(),
        "cores": os.cpu_count(),
        "load_average_at_start": LOAD_AT_START,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in distributions},
        "compared": list(compared),
    }


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write results as JSON, unless other programs ran when this one began.

    Raises:
        SystemExit: the load was above `MAX_LOAD_PER_CORE`; nothing is written. Those of `--quick`, which mean
            nothing, are written in any case.
    """
    most = MAX_LOAD_PER_CORE * (os.cpu_count() or 1)
    if most < LOAD_AT_START and "--quick" not in sys.argv:
        sys.exit(
            f"{path} is not written: the load average was {LOAD_AT_START:.1f} at the start, and above "
            f"{most:.1f} figures depend on other programs. Run this on an idle machine"
        )
    path.write_text(json.dumps(results, indent=1) + "\n")
