"""Measure what cache policies cost, per block of a prompt, against no policy. See benchmarks/README.md."""

import argparse
import statistics
from pathlib import Path

from measuring import describe_run, write_results
from request_runs import read_fitting_requests, run_requests

from kv_pool import BlockPool
from kv_pool.core.policy_names import list_policies
from kv_pool.replay.replay_request import ReplayRequest

NONE = "no policy"


def run(requests: list[ReplayRequest], options: argparse.Namespace, policy: str) -> tuple[float, int]:
    """Run all requests with a policy. Return the nanoseconds per block, and the hit blocks."""
    return run_requests(
        requests,
        BlockPool(options.blocks + 1, True, options.block_size, policy=None if policy == NONE else policy),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", default="mooncake_conversation")
    parser.add_argument("--blocks", type=int, default=300_000, help="blocks of the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--limit", type=int, default=2000, help="requests")
    parser.add_argument("--policy", action="append", help="default: all; may be repeated")
    parser.add_argument("--runs", type=int, default=5, help="runs of each policy, in turn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [NONE, *(options.policy or ["lru", *list_policies()])]
    requests = read_fitting_requests(options.trace, options.blocks, options.block_size, options.limit)
    samples: dict[str, list[float]] = {name: [] for name in names}
    hits: dict[str, int] = {}
    for _ in range(options.runs):
        for name in names:
            ns_per_block, hits[name] = run(requests, options, name)
            samples[name].append(ns_per_block)
    base = statistics.median(samples[NONE])
    print(f"{'policy':16} {'ns/block':>9} {'fastest':>8} {'ratio':>6} {'hit blocks':>11}")
    for name in names:
        median = statistics.median(samples[name])
        print(f"{name:16} {median:9.1f} {min(samples[name]):8.1f} {median / base:6.2f} {hits[name]:11,}")
    if options.json is not None:
        results = {"provenance": describe_run(names), "ns_per_block": samples, "hit_blocks": hits}
        write_results(options.json, results)


if __name__ == "__main__":
    main()
