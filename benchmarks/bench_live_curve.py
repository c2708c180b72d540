"""Measure a live curve: its error, its bytes and its cost. See benchmarks/README.md."""

import statistics
import time
import tracemalloc
from math import sqrt
from typing import Any

from measuring import Options, make_parser, read_options, start_run, write_results
from request_runs import read_fitting_requests, run_requests

from kv_pool import BlockPool
from kv_pool.core.live_curve import LiveCurve
from kv_pool.lab import ReplaySettings, measure_curves
from kv_pool.lab.replay_request import ReplayRequest
from kv_pool.reports import read_live_curve

MULTIPLES = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0)
WITHOUT_DECAY = 10**15


def make_pool(options: Options, live_curve: bool) -> BlockPool:
    return BlockPool(options.blocks + 1, True, options.block_size, live_curve=live_curve)


def measure_errors(requests: list[ReplayRequest], options: Options) -> list[dict[str, float]]:
    """Compare curves of several samples with the exact one."""
    settings = ReplaySettings(
        options.trace, options.blocks, block_size=options.block_size, limit=options.limit
    )
    capacities = [round(options.blocks * multiple) for multiple in MULTIPLES]
    exact = {point.num_blocks: point.lru for point in measure_curves(settings, capacities).points}
    reports = []
    for salt in range(options.samples):
        pool = make_pool(options, True)
        curve = LiveCurve(
            options.blocks, options.block_size, time.monotonic, half_life=WITHOUT_DECAY, salt=salt
        )
        pool.parts.append(curve)  # pools have no option for the sample
        run_requests(requests, pool)
        reports.append(read_live_curve(curve, MULTIPLES))
    rows = []
    for position, (multiple, capacity) in enumerate(zip(MULTIPLES, capacities, strict=True)):
        points = [report.points[position] for report in reports if report.points]
        off = [point.block_hit_rate - exact[capacity].block_hit_rate for point in points]
        rows.append(
            {
                "multiple": multiple,
                "exact": exact[capacity].block_hit_rate,
                "rms_error": sqrt(sum(value * value for value in off) / len(off)) if off else 0.0,
                "stated_error": statistics.fmean(point.block_rate_error for point in points) if off else 0.0,
            }
        )
    return rows


def measure_bytes(options: Options) -> int:
    """Return the bytes of a curve whose sample is full, with the keys that it keeps."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    curve = LiveCurve(options.blocks, options.block_size, time.monotonic)
    stack = curve.stack
    parent: Any = None
    for number in range(int(stack.limit)):
        key = number.to_bytes(36, "big")  # as long as a SHA-256 hash with its group
        parent = stack.append(parent if number % 50 else None, key, number & 7)
    curve.counts = [float(number) + 0.5 for number in range(len(curve.counts))]
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return traced


def measure_cost(requests: list[ReplayRequest], options: Options) -> dict[str, float]:
    """Time pools without and with a curve in turn."""
    times = [
        [run_requests(requests, make_pool(options, on))[0] for on in (False, True)]
        for _ in range(options.runs)
    ]
    return {
        "without_ns": statistics.median(without for without, _ in times),
        "added_ns": statistics.median(with_curve - without for without, with_curve in times),
    }


def main() -> None:
    parser = make_parser(__doc__, runs=5, seeded=False)
    parser.add_argument("--trace", default="mooncake_conversation")
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks of the pool")
    parser.add_argument("--block-size", type=int, default=512, help="tokens per block")
    parser.add_argument("--limit", type=int, default=20_000, help="requests")
    parser.add_argument("--samples", type=int, default=8, help="samples whose curves are compared")
    options = read_options(parser)
    provenance = start_run(options)
    requests = read_fitting_requests(options.trace, options.blocks, options.block_size, options.limit)
    found: dict[str, Any] = {"errors": measure_errors(requests, options)}
    found["bytes"] = measure_bytes(options)
    found |= measure_cost(requests, options)
    for row in found["errors"]:
        print(
            f"{row['multiple']:4} x  exact {row['exact']:7.2%}  error (rms) {100 * row['rms_error']:5.2f}  "
            f"stated {100 * row['stated_error']:5.2f} points"
        )
    print(
        f"{found['bytes']:,} bytes; {found['added_ns']:.1f} ns per block added to {found['without_ns']:.1f}"
    )
    write_results(options, {"provenance": provenance, **found})


if __name__ == "__main__":
    main()
