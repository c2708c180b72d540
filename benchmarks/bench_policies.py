"""Measure what cache policies cost, per block of a prompt, against no policy. See benchmarks/README.md."""

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

from bench_block_pool import describe_run

from kv_pool import BlockPool, KVCacheManager
from kv_pool.core.policy_names import list_policies
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.settings import ReplaySettings

NONE = "no policy"


def read_requests(options: argparse.Namespace) -> list[ReplayRequest]:
    """Return the requests of the trace that fit into the pool."""
    settings = ReplaySettings(options.trace, options.blocks, limit=options.limit)
    requests = settings.read_requests(settings.open_trace(), options.block_size)
    return [request for request in requests if len(request.block_hashes) < options.blocks]


def run(requests: list[ReplayRequest], options: argparse.Namespace, policy: str) -> tuple[float, int]:
    """Run all requests one after the other. Return nanoseconds per block, and the hit blocks."""
    pool = BlockPool(options.blocks + 1, True, options.block_size, policy=None if policy == NONE else policy)
    manager = KVCacheManager(pool)
    num_blocks = num_hits = 0
    gc.collect()
    gc.disable()
    start = time.perf_counter_ns()
    for request in requests:
        prefix = manager.get_computed_blocks(request, request.max_hit_tokens)
        manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
        request.num_computed_tokens = request.num_tokens
        num_hits += prefix.num_tokens // options.block_size
        num_blocks += len(request.block_hashes)
        manager.free(request)
        request.num_computed_tokens = 0
    elapsed = time.perf_counter_ns() - start
    gc.enable()
    return elapsed / num_blocks, num_hits


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
    requests = read_requests(options)
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
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
