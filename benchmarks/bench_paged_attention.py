"""Compare attention over blocks with attention over dense tensors. See benchmarks/README.md."""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from measuring import Row, make_parser, print_header, read_options, start_run, write_results

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


def list_cases(scale: int, seed: int) -> list[Case]:
    """Return the cases, with contexts divided by `scale`."""
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


def main() -> None:
    parser = make_parser(__doc__, runs=21)
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...")
    parser.add_argument("--scale", type=int, default=1, help="divisor of the lengths of contexts")
    options = read_options(parser, scale=16, runs=3)
    torch.set_num_threads(1)
    facts = {"cpu_capability": torch.backends.cpu.get_cpu_capability(), "threads": 1}
    if options.device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(options.device)
    provenance = start_run(options, "torch", **facts)
    print_header("fastest dense / this")
    rows = []
    for case in list_cases(options.scale, options.seed):
        for layout in case.layouts:
            batch = Batch(case, layout, options.seed, options.device)
            ways = {
                "paged": batch.attend_paged,
                "dense": batch.attend_dense,
                "one by one": batch.attend_one_by_one,
            }
            if case.query_lens[0] == 1:
                ways["dense, grouped"] = batch.attend_dense_grouped
            title = f"{case.title}, {case.num_heads}/{case.num_kv_heads} x {case.head_size}, {case.dtype}, "
            times = measure(ways, options.runs, options.device)
            medians = {name: statistics.median(values) for name, values in times.items()}
            fastest = min((name for name in medians if name.startswith("dense")), key=medians.__getitem__)
            rows.append(Row(title + layout, "ms", times, fastest))
            rows[-1].print()
    write_results(options, {"provenance": provenance, "rows": [row.to_json() for row in rows]})


if __name__ == "__main__":
    main()
