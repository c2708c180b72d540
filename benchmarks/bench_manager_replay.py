"""Measure the cost of a request with different pools. See benchmarks/README.md for the columns."""

import argparse
import gc
import hashlib
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import describe_run, write_results

import kv_pool
from kv_pool.ids import BlockHash
from kv_pool.replay.replay_request import ReplayRequest
from kv_pool.replay.trace import Trace, find_trace

OWN, OURS, VLLM = "kv_pool's manager on kv_pool", "vLLM's manager on kv_pool", "vLLM's manager on vLLM"
"""The compared pairs of `KVCacheManager` and `BlockPool`."""


class Lane(ABC):
    """A manager that replays the requests, with its time per call."""

    def __init__(self, name: str, manager: Any) -> None:
        self.name = name
        self.manager = manager
        self.elapsed_ns = {"look up": 0, "allocate": 0, "free": 0}
        self.num_hit_tokens = 0

    @abstractmethod
    def replay(self, requests: list[Any]) -> None:
        """Look up, allocate and free each request. Add the times to `elapsed_ns`."""


class OwnLane(Lane):
    """A lane with `kv_pool.KVCacheManager`."""

    def replay(self, requests: list[Any]) -> None:
        manager, now = self.manager, time.perf_counter_ns
        for request in requests:
            start = now()
            prefix = manager.get_computed_blocks(request)
            looked_up = now()
            blocks = manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix)
            allocated = now()
            manager.free(request)
            freed = now()
            if blocks is None:
                raise RuntimeError("a request does not fit into the pool: give it more --blocks")
            self.num_hit_tokens += prefix.num_tokens
            self.elapsed_ns["look up"] += looked_up - start
            self.elapsed_ns["allocate"] += allocated - looked_up
            self.elapsed_ns["free"] += freed - allocated


class VllmLane(Lane):
    """A lane with vLLM's own `KVCacheManager`, on either pool."""

    def replay(self, requests: list[Any]) -> None:
        manager, now = self.manager, time.perf_counter_ns
        for request in requests:
            start = now()
            hits, num_hit_tokens, _ = manager.get_computed_blocks(request)
            looked_up = now()
            blocks = manager.allocate_slots(
                request, request.num_tokens - num_hit_tokens, num_hit_tokens, hits
            )
            allocated = now()
            manager.free(request)
            freed = now()
            if blocks is None:
                raise RuntimeError("a request does not fit into the pool: give it more --blocks")
            self.num_hit_tokens += num_hit_tokens
            self.elapsed_ns["look up"] += looked_up - start
            self.elapsed_ns["allocate"] += allocated - looked_up
            self.elapsed_ns["free"] += freed - allocated


def make_own_lane(options: argparse.Namespace) -> Lane:
    pool = kv_pool.BlockPool(options.blocks, True, options.block_size)
    return OwnLane(OWN, kv_pool.KVCacheManager(pool))


def make_vllm_lanes(options: argparse.Namespace) -> tuple[list[Lane], Callable[[ReplayRequest], Any]]:
    """Create vLLM's manager twice, the second time with its pool class replaced by ours.

    Returns:
        The two lanes, and a factory of vLLM's requests.
    """
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core import kv_cache_coordinator
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    block_size: int = options.block_size
    params = SamplingParams(max_tokens=1)
    params.update_from_generation_config({}, eos_token_id=0)

    def make_manager() -> Any:
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(num_blocks=options.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        return KVCacheManager(
            config, max_model_len=10_000_000, scheduler_block_size=block_size, hash_block_size=block_size
        )

    def make_request(request: ReplayRequest) -> Any:
        return Request(
            request_id=request.request_id,
            prompt_token_ids=[0] * request.num_tokens,  # only the hashes distinguish requests
            sampling_params=params,
            pooling_params=None,
            block_hasher=lambda _: list(request.block_hashes),
        )

    theirs = make_manager()
    their_pool = kv_cache_coordinator.BlockPool
    kv_cache_coordinator.BlockPool = kv_pool.BlockPool
    try:
        ours = make_manager()
    finally:
        kv_cache_coordinator.BlockPool = their_pool
    if type(theirs.block_pool) is not their_pool or type(ours.block_pool) is not kv_pool.BlockPool:
        raise RuntimeError("vLLM's coordinator does not create its pool where this script expects it")
    return [VllmLane(OURS, ours), VllmLane(VLLM, theirs)], make_request


def make_batches(trace: Trace, options: argparse.Namespace) -> Iterator[list[ReplayRequest]]:
    """Yield the trace's first requests in batches."""
    batch: list[ReplayRequest] = []
    for number, traced in enumerate(trace):
        if number == options.requests:
            break
        request = ReplayRequest(traced, options.block_size, trace_block_size=trace.block_size)
        # Same length as an engine's hashes.
        request.block_hashes = [BlockHash(hashlib.sha256(short).digest()) for short in request.block_hashes]
        batch.append(request)
        if len(batch) == options.batch:
            yield batch
            batch = []
    if batch:
        yield batch


def replay_once(options: argparse.Namespace) -> tuple[list[Lane], int, int]:
    """Run all lanes over the same requests, batch by batch in turn. Return lanes and counts."""
    lanes = [make_own_lane(options)]
    make_vllm_request: Callable[[ReplayRequest], Any] | None = None
    try:
        vllm_lanes, make_vllm_request = make_vllm_lanes(options)
        lanes += vllm_lanes
    except ImportError as error:
        print(f"missing: vLLM ({error}); ratios to it are omitted", file=sys.stderr)
    num_requests = num_blocks = 0
    for turn, batch in enumerate(make_batches(Trace(find_trace(options.trace)), options)):
        num_requests += len(batch)
        num_blocks += sum(-(-request.num_tokens // options.block_size) for request in batch)
        shift = turn % len(lanes)
        for lane in lanes[shift:] + lanes[:shift]:
            requests: list[Any] = batch
            if isinstance(lane, VllmLane) and make_vllm_request is not None:
                requests = [make_vllm_request(request) for request in batch]
            gc.collect()
            gc.disable()
            lane.replay(requests)
            gc.enable()
    if len({lane.num_hit_tokens for lane in lanes}) != 1:
        raise RuntimeError("the managers found different hits")
    return lanes, num_requests, num_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default="mooncake_conversation", help="name of a bundled trace, or a file")
    parser.add_argument("--requests", type=int, default=2_000, help="number of requests, from the start")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per block")
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks of each pool")
    parser.add_argument("--batch", type=int, default=200, help="requests that one manager replays at a time")
    parser.add_argument("--runs", type=int, default=3, help="number of replays; the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    options = parser.parse_args()
    runs = []
    for _ in range(options.runs):
        lanes, num_requests, num_blocks = replay_once(options)
        runs.append({lane.name: lane.elapsed_ns for lane in lanes})
        num_hit_tokens = lanes[0].num_hit_tokens
    mode = "compiled" if kv_pool.COMPILED else "plain"
    provenance = describe_run([mode])
    print(
        f"{num_requests:,} requests, {num_blocks:,} blocks of {options.block_size} tokens, "
        f"{num_hit_tokens:,} tokens hit; pools of {options.blocks:,}; kv_pool {mode}"
    )
    print(f"{'µs/request':30}{'look up':>10}{'allocate':>10}{'free':>10}{'all':>10}{'vLLM / this':>13}")
    rows = []
    totals = {lane.name: statistics.median(sum(run[lane.name].values()) for run in runs) for lane in lanes}
    for lane in lanes:
        medians = {
            call: statistics.median(run[lane.name][call] for run in runs) / num_requests / 1e3
            for call in lane.elapsed_ns
        }
        ratio = totals[VLLM] / totals[lane.name] if VLLM in totals else None
        figures = "".join(f"{median:>10.1f}" for median in medians.values())
        total_us = totals[lane.name] / num_requests / 1e3
        print(f"{lane.name:30}{figures}{total_us:>10.1f}{f'{ratio:.2f}' if ratio else '-':>13}")
        rows.append(
            {"name": lane.name, "us_per_request": {**medians, "all": total_us}, "vllm_over_this": ratio}
        )
    if options.json:
        shown = {key: str(value) for key, value in vars(options).items() if key != "json"}
        answer = {"provenance": provenance, "options": shown, "rows": rows, "runs": runs}
        write_results(options.json, answer)


if __name__ == "__main__":
    main()
