"""Measure how much a host tier and a disk tier raise the hit rate. See benchmarks/README.md."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from measuring import make_parser, read_options, start_run, write_results
from request_runs import AGENTIC

from kv_pool.drawing import check_can_draw
from kv_pool.lab.pictures.hit_rates import draw_hit_rates
from kv_pool.lab.report import ReplayReport
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.simulator import run_replay
from kv_pool.lab.trace import Trace
from kv_pool.shared_options import BUNDLED_TRACES


@dataclass(frozen=True)
class Workload:
    """A trace and the capacities to replay it with, in blocks of its own size."""

    name: str
    trace: str
    device: tuple[int, ...]
    host: tuple[int, ...]
    disk: int


WORKLOADS = [
    Workload(
        "conversation", "mooncake_conversation", (1_000, 3_000, 10_000), (10_000, 30_000, 100_000), 100_000
    ),
    Workload("coding agents", str(AGENTIC), (10_000,), (30_000, 100_000), 200_000),
]


@dataclass(frozen=True)
class Row:
    """The replays of one row.

    Attributes:
        tiered: the pool with its tiers, if any.
        through: the same with write-through.
        one_pool: a pool as large as the pool and its tiers together.
    """

    workload: str
    device: int
    host: int
    disk: int
    tiered: ReplaySettings
    through: ReplaySettings | None = None
    one_pool: ReplaySettings | None = None


def list_rows(workload: Workload, limit: int | None) -> list[Row]:
    """Return rows for each pool size: alone, with each host tier, with the largest host tier and a disk."""
    rows = []
    for device in workload.device:
        rows.append(Row(workload.name, device, 0, 0, ReplaySettings(workload.trace, device, limit=limit)))
        for host, disk in [*((host, 0) for host in workload.host), (workload.host[0], workload.disk)]:
            tiered = ReplaySettings(workload.trace, device, host_tier=host, disk_tier=disk, limit=limit)
            rows.append(
                Row(
                    workload.name,
                    device,
                    host,
                    disk,
                    tiered,
                    replace(tiered, tier_write="through"),
                    ReplaySettings(workload.trace, device + host + disk, limit=limit),
                )
            )
    return rows


def is_there(trace: str) -> bool:
    """Return True if the trace can be read; print a note if not."""
    if trace in BUNDLED_TRACES or Path(trace).is_file():
        return True
    print(f"missing: {trace}", file=sys.stderr)
    return False


def run_all(settings: list[ReplaySettings], num_processes: int) -> dict[ReplaySettings, ReplayReport]:
    """Return the report of each replay."""
    distinct = list(dict.fromkeys(settings))
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as executor:
        return dict(zip(distinct, executor.map(run_replay, distinct), strict=True))


def describe(row: Row, reports: dict[ReplaySettings, ReplayReport]) -> dict[str, Any]:
    """Return the figures of a row: shares of the trace's prompt tokens, and numbers of copied blocks."""
    report = reports[row.tiered]
    by_medium = {tier.medium: tier for tier in report.tiers}
    shares = {medium: tier.tokens_hit / report.tokens_in for medium, tier in by_medium.items()}
    return {
        "workload": row.workload,
        "device_blocks": row.device,
        "host_blocks": row.host,
        "disk_blocks": row.disk,
        "hit_gpu": report.token_hit_rate - sum(shares.values()),
        "hit_cpu": shares.get("CPU", 0.0),
        "hit_storage": shares.get("STORAGE", 0.0),
        "hit_all": report.token_hit_rate,
        "hit_written_through": None if row.through is None else reports[row.through].token_hit_rate,
        "hit_one_pool": None if row.one_pool is None else reports[row.one_pool].token_hit_rate,
        "refused": report.refused_requests,
        "blocks_written": {medium: tier.blocks_written for medium, tier in by_medium.items()},
        "blocks_read": {medium: tier.blocks_read for medium, tier in by_medium.items()},
        "blocks_written_through": None
        if row.through is None
        else {tier.medium: tier.blocks_written for tier in reports[row.through].tiers},
    }


HEADINGS = ("device", "host", "disk", "GPU", "CPU", "STORAGE", "in all", "through", "one pool", "out", "back")


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print one table for each trace."""
    for name in dict.fromkeys(row["workload"] for row in rows):
        print(f"\n{name}\n" + "".join(f"{heading:>10}" for heading in HEADINGS))
        for row in rows:
            if row["workload"] == name:
                print("".join(f"{cell:>10}" for cell in format_cells(row)))


def format_cells(row: dict[str, Any]) -> list[str]:
    sizes = [f"{row[key]:,}" for key in ("device_blocks", "host_blocks", "disk_blocks")]
    keys = ("hit_gpu", "hit_cpu", "hit_storage", "hit_all", "hit_written_through", "hit_one_pool")
    shares = ["" if row[key] is None else f"{row[key]:.2%}" for key in keys]
    copied = [f"{row[key].get('CPU', 0):,}" for key in ("blocks_written", "blocks_read")]
    return [*sizes, *shares, *copied]


def main() -> None:
    parser = make_parser(__doc__, seeded=False)
    parser.add_argument("--limit", type=int, help="maximum number of requests per trace; for a smoke test")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--png", metavar="FILE", help="draw the conversation's curves to FILE")
    options = read_options(parser)
    if options.png:
        check_can_draw(options.png)
    provenance = start_run(options)
    workloads = [workload for workload in WORKLOADS if is_there(workload.trace)]
    rows = [row for workload in workloads for row in list_rows(workload, options.limit)]
    settings = [one for row in rows for one in (row.tiered, row.through, row.one_pool) if one is not None]
    reports = run_all(settings, options.jobs)
    described = [describe(row, reports) for row in rows]
    print_rows(described)
    if options.png:
        is_drawn = {row.tiered for row in rows if row.workload == workloads[0].name and not row.disk}
        is_drawn |= {row.one_pool for row in rows if row.workload == workloads[0].name and row.one_pool}
        draw_hit_rates([reports[one] for one in settings if one in is_drawn], options.png)
    digests = {workload.name: Trace(workload.trace).digest() for workload in workloads}
    write_results(options, {"provenance": provenance, "traces": digests, "rows": described})


if __name__ == "__main__":
    main()
