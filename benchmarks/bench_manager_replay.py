"""Measure the cost of a request with different pools. See benchmarks/README.md for the columns."""

import hashlib
import statistics
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

from measuring import Options, gc_off, in_turn, make_parser, read_options, start_run, write_results
from request_runs import make_vllm_config, make_vllm_manager, make_vllm_request, read_requests

import kv_pool
from kv_pool.ids import BlockHash
from kv_pool.lab.replay_request import ReplayRequest

OWN, OURS, VLLM = "kv_pool's manager on kv_pool", "vLLM's manager on kv_pool", "vLLM's manager on vLLM"
"""The compared pairs of `KVCacheManager` and `BlockPool`."""


class Lane(ABC):
    """A manager that replays the requests, with its time per call."""

    def __init__(self, name: str, manager: Any) -> None:
        self.name = name
        self.manager = manager
        self.elapsed_ns = {"look up": 0, "allocate": 0, "free": 0}
        self.num_hit_tokens = 0

    def make_request(self, request: ReplayRequest) -> Any:
        """Return the request as its manager reads it."""
        return request

    @abstractmethod
    def look_up(self, request: Any) -> tuple[int, Any]:
        """Return the number of tokens hit, and the hits."""

    @abstractmethod
    def allocate(self, request: Any, num_hit_tokens: int, hits: Any) -> Any:
        """Allocate all slots of the request; None if they do not fit."""

    def replay(self, requests: list[Any]) -> None:
        """Look up, allocate and free each request. Add the times to `elapsed_ns`."""
        manager, now = self.manager, time.perf_counter_ns
        for request in requests:
            start = now()
            num_hit_tokens, hits = self.look_up(request)
            looked_up = now()
            blocks = self.allocate(request, num_hit_tokens, hits)
            allocated = now()
            manager.free(request)
            freed = now()
            if blocks is None:
                raise RuntimeError("a request does not fit into the pool: give it more --blocks")
            self.num_hit_tokens += num_hit_tokens
            self.elapsed_ns["look up"] += looked_up - start
            self.elapsed_ns["allocate"] += allocated - looked_up
            self.elapsed_ns["free"] += freed - allocated


class OwnLane(Lane):
    """A lane with `kv_pool.KVCacheManager`."""

    def look_up(self, request: Any) -> tuple[int, Any]:
        prefix = self.manager.get_computed_blocks(request)
        return prefix.num_tokens, prefix

    def allocate(self, request: Any, num_hit_tokens: int, hits: Any) -> Any:
        return self.manager.allocate_slots(request, request.num_tokens - num_hit_tokens, hits)


class VllmLane(Lane):
    """A lane with vLLM's own `KVCacheManager`, on either pool."""

    def make_request(self, request: ReplayRequest) -> Any:
        hashes = request.block_hashes
        # Only the hashes distinguish requests.
        return make_vllm_request(request.request_id, [0] * request.num_tokens, 1, lambda _: list(hashes))

    def look_up(self, request: Any) -> tuple[int, Any]:
        hits, num_hit_tokens, _ = self.manager.get_computed_blocks(request)
        return num_hit_tokens, hits

    def allocate(self, request: Any, num_hit_tokens: int, hits: Any) -> Any:
        num_new = request.num_tokens - num_hit_tokens
        return self.manager.allocate_slots(request, num_new, num_hit_tokens, hits)


def make_vllm_lanes(options: Options) -> list[Lane]:
    """Create vLLM's manager twice, the second time with its pool class replaced by ours."""
    from vllm.v1.core import kv_cache_coordinator

    config = make_vllm_config(options.blocks, options.block_size)
    theirs = make_vllm_manager(config, options.block_size)
    their_pool = kv_cache_coordinator.BlockPool
    kv_cache_coordinator.BlockPool = kv_pool.BlockPool
    try:
        ours = make_vllm_manager(config, options.block_size)
    finally:
        kv_cache_coordinator.BlockPool = their_pool
    if type(theirs.block_pool) is not their_pool or type(ours.block_pool) is not kv_pool.BlockPool:
        raise RuntimeError("vLLM's coordinator does not create its pool where this script expects it")
    return [VllmLane(OURS, ours), VllmLane(VLLM, theirs)]


def replay_once(options: Options, requests: list[ReplayRequest]) -> list[Lane]:
    """Run all lanes over the same requests, batch by batch in turn."""
    pool = kv_pool.BlockPool(options.blocks, True, options.block_size)
    lanes: list[Lane] = [OwnLane(OWN, kv_pool.KVCacheManager(pool))]
    try:
        lanes += make_vllm_lanes(options)
    except ImportError as error:
        print(f"missing: vLLM ({error}); ratios to it are omitted", file=sys.stderr)
    for turn, first in enumerate(range(0, len(requests), options.batch)):
        for lane in in_turn(lanes, turn):
            batch = [lane.make_request(request) for request in requests[first : first + options.batch]]
            with gc_off():
                lane.replay(batch)
    if len({lane.num_hit_tokens for lane in lanes}) != 1:
        raise RuntimeError("the managers found different hits")
    return lanes


def main() -> None:
    parser = make_parser(__doc__, runs=3, seeded=False)
    parser.add_argument("--trace", default="mooncake_conversation", help="name of a bundled trace, or a file")
    parser.add_argument("--requests", type=int, default=2_000, help="number of requests, from the start")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks of each pool")
    parser.add_argument("--batch", type=int, default=200, help="requests that one manager replays at a time")
    options = read_options(parser)
    provenance = start_run(options)
    requests = read_requests(options.trace, options.block_size, options.requests)
    for request in requests:
        # Same length as an engine's hashes.
        request.block_hashes = [BlockHash(hashlib.sha256(short).digest()) for short in request.block_hashes]
    runs = [replay_once(options, requests) for _ in range(options.runs)]
    names = [lane.name for lane in runs[0]]
    num_blocks = sum(-(-request.num_tokens // options.block_size) for request in requests)
    print(
        f"{len(requests):,} requests, {num_blocks:,} blocks of {options.block_size} tokens, "
        f"{runs[0][0].num_hit_tokens:,} tokens hit; pools of {options.blocks:,}"
    )
    print(f"{'µs/request':30}{'look up':>10}{'allocate':>10}{'free':>10}{'all':>10}{'vLLM / this':>13}")
    rows: list[dict[str, Any]] = []
    for position, name in enumerate(names):
        times = [lanes[position].elapsed_ns for lanes in runs]
        us = {call: statistics.median(one[call] for one in times) / len(requests) / 1e3 for call in times[0]}
        us["all"] = statistics.median(sum(one.values()) for one in times) / len(requests) / 1e3
        rows.append({"name": name, "us_per_request": us, "runs_ns": times})
    for row in rows:
        us = row["us_per_request"]
        ratio = rows[-1]["us_per_request"]["all"] / us["all"] if VLLM in names else None
        figures = "".join(f"{median:>10.1f}" for median in us.values())
        print(f"{row['name']:30}{figures}{f'{ratio:.2f}' if ratio else '-':>13}")
        row["vllm_over_this"] = ratio
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
