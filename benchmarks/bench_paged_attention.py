"""Compare attention over blocks with attention over dense tensors. See benchmarks/README.md."""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
import torch
from measuring import find_cpu_model, write_results

import kv_pool
from kv_pool.integrations.attention import paged_attention
from kv_pool.storage import KVStorage

BLOCK_SIZE = 16
NUM_WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """A batch: sequence i has `seq_lens[i]` tokens of K and V; the last `query_lens[i]` are queries."""

    title: str
    seq_lens: list[int]
    query_lens: list[int]
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    layouts: tuple[str, ...] = ("NHD", "HND", "FLASH")


class Batch:
    """The K and V of a case in the blocks of a storage, in random order, and dense."""

    def __init__(self, case: Case, layout: str, seed: int, device: str) -> None:
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.case = case
        num_blocks = [-(-length // BLOCK_SIZE) for length in case.seq_lens]
        ids = rng.sample(range(1, sum(num_blocks) + 1), sum(num_blocks))
        self.tables = np.zeros((len(num_blocks), max(num_blocks)), np.int32)
        for row, count in zip(self.tables, num_blocks, strict=True):
            row[:count], ids = ids[:count], ids[count:]
        storage = KVStorage.allocate(
            sum(num_blocks) + 1,
            BLOCK_SIZE,
            1,
            case.num_kv_heads,
            case.head_size,
            case.dtype,
            device,
            layout=layout,
            library="torch",
        )
        self.caches = storage.get_caches(0)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, generator=generator).to(device))
        shape = (sum(case.query_lens), case.num_heads, case.head_size)
        self.query = torch.randn(shape, generator=generator).to(self.caches[0])
        self.query_start_loc = np.cumsum([0, *case.query_lens])
        # (num_seqs, num_kv_heads, longest, head_size), contiguous; shorter sequences are padded.
        self.dense = [
            cache[torch.from_numpy(self.tables.astype(np.int64)).to(device)].flatten(1, 2).transpose(1, 2)
            for cache in self.caches
        ]
        self.dense = [dense[:, :, : max(case.seq_lens)].contiguous() for dense in self.dense]
        lengths = torch.tensor(case.seq_lens)[:, None]
        is_written = torch.arange(max(case.seq_lens)) < lengths
        self.mask = None if bool(is_written.all()) else is_written[:, None, None].to(device)

    def attend_paged(self) -> torch.Tensor:
        return paged_attention(
            self.query, *self.caches, self.tables, self.case.seq_lens, self.query_start_loc
        )

    def attend_one_by_one(self) -> torch.Tensor:
        """Gather each sequence's blocks and call torch's attention for it."""
        parts = []
        for row, (length, query) in enumerate(
            zip(self.case.seq_lens, self.query.split(self.case.query_lens), strict=True)
        ):
            blocks = torch.from_numpy(self.tables[row, : -(-length // BLOCK_SIZE)].astype(np.int64))
            blocks = blocks.to(self.query.device)
            key, value = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in self.caches)
            found = torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1)[None], key[None], value[None], is_causal=len(query) > 1, enable_gqa=True
            )
            parts.append(found[0].transpose(0, 1))
        return torch.cat(parts)

    def attend_dense(self) -> torch.Tensor:
        """Call torch's attention once for all sequences, padded to the longest."""
        case = self.case
        query = self.query.unflatten(0, (len(case.seq_lens), -1)).transpose(1, 2)
        found = torch.nn.functional.scaled_dot_product_attention(
            query, *self.dense, attn_mask=self.mask, is_causal=case.query_lens[0] > 1, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)

    def attend_dense_grouped(self) -> torch.Tensor:
        """Like `attend_dense`, for decode: the query heads of a KV head are the rows of one matrix."""
        case = self.case
        query = self.query.unflatten(1, (case.num_kv_heads, -1))
        found = torch.nn.functional.scaled_dot_product_attention(query, *self.dense, attn_mask=self.mask)
        return found.flatten(1, 2)


def list_cases(is_quick: bool, seed: int) -> list[Case]:
    scale = 16 if is_quick else 1
    rng = random.Random(seed)
    mixed = [rng.randint(256 // scale, 3840 // scale) for _ in range(64)]
    decode = [1] * 64
    equal = [2048 // scale] * 64
    prompts = [2048 // scale] * 4
    return [
        Case(f"decode, 64 x {equal[0]}", equal, decode, 8, 2, 64, "float32"),
        Case(f"decode, 64 x {equal[0]}", equal, decode, 32, 8, 64, "float32"),
        Case(f"decode, 64 x {equal[0]}", equal, decode, 32, 8, 64, "bfloat16", ("NHD",)),
        Case(f"decode, 64 x {min(mixed)}-{max(mixed)}", mixed, decode, 8, 2, 64, "float32", ("NHD",)),
        Case(f"prefill, 4 x {prompts[0]}", prompts, prompts, 8, 2, 64, "float32", ("NHD",)),
    ]


def read_clock(device: str) -> int:
    """Return the time in nanoseconds; on a GPU, after all queued work is complete."""
    if device == "cpu":
        return time.thread_time_ns()
    torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def measure(
    ways: dict[str, Callable[[], torch.Tensor]], num_runs: int, device: str
) -> dict[str, list[float]]:
    """Return milliseconds per call, one list per method; the methods take turns.

    On a CPU this is processor time of the thread; on a GPU the time from the call to the end of its work.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected = ways["dense"]().float()
    for run in range(NUM_WARM_UP + num_runs):
        for name, way in ways.items():
            started = read_clock(device)
            found = way()
            elapsed = (read_clock(device) - started) / 1e6
            if run == 0:
                torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
            elif run >= NUM_WARM_UP:
                times[name].append(elapsed)
    return times


def print_rows(case: Case, layout: str, times: dict[str, list[float]]) -> dict[str, Any]:
    heads = f"{case.num_heads}/{case.num_kv_heads} x {case.head_size}, {case.dtype}"
    fastest = min(statistics.median(values) for name, values in times.items() if name.startswith("dense"))
    rows = {}
    for name, values in times.items():
        ordered = sorted(values)
        median = statistics.median(ordered)
        rows[name] = {
            "median_ms": median,
            "p10_ms": ordered[len(ordered) // 10],
            "p90_ms": ordered[len(ordered) * 9 // 10],
            "runs": len(ordered),
            "of_fastest_dense": median / fastest,
        }
        figures = " ".join(f"{rows[name][column]:8.1f}" for column in ("median_ms", "p10_ms", "p90_ms"))
        print(f"{case.title:<22} {heads:<22} {layout:<6} {name:<14} {figures} {median / fastest:7.2f}")
    return {"title": case.title, "heads": heads, "layout": layout, "ways": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="contexts of a sixteenth, 3 runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    provenance = {
        "command": " ".join(["python", "benchmarks/bench_paged_attention.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": find_cpu_model(),
        "python": python_version(),
        "torch": f"{torch.__version__}, 1 thread, {torch.backends.cpu.get_cpu_capability()}",
        "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(options.device),
        "kv_pool": kv_pool.__version__,
        "seed": options.seed,
        "load_average_at_start": os.getloadavg()[0],
    }
    print("  ".join(f"{name}: {value}" for name, value in provenance.items()))
    print(f"\n{'milliseconds a call':<67} {'median':>8} {'p10':>8} {'p90':>8} {'/ dense':>7}")
    rows = []
    for case in list_cases(options.quick, options.seed):
        for layout in case.layouts:
            batch = Batch(case, layout, options.seed, options.device)
            ways = {
                "paged": batch.attend_paged,
                "dense": batch.attend_dense,
                "one by one": batch.attend_one_by_one,
            }
            if case.query_lens[0] == 1:
                ways["dense, grouped"] = batch.attend_dense_grouped
            num_runs = 3 if options.quick else options.runs
            rows.append(print_rows(case, layout, measure(ways, num_runs, options.device)))
    if options.json:
        write_results(options.json, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
