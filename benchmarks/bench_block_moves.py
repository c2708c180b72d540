"""Compare moving blocks with copying as many bytes. See benchmarks/README.md."""

import argparse
import ctypes
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import Sample, describe_run, interleave, summarize, write_results

from kv_pool.ids import BlockId, BlockMove
from kv_pool.storage import KVStorage
from kv_pool.storage.block_storage import CopyBlocks
from kv_pool.storage.copy_cpu import copy_on_cpu

# Heads and head size of Llama-3-8B, float16: 64 KiB of K and V per layer at 16 tokens per block.
HEADS, HEAD_SIZE, TOKEN_BYTES = 8, 128, 2 * 8 * 128 * 2
LAYER_TOKENS = 16
RUN_BLOCKS = 16
LAYOUTS = {"LBNHC": "layer outermost", "BLNHC": "block outermost", "LHBNC": "layer, then head outermost"}


def choose_sizes(block_bytes: int) -> tuple[int, int]:
    """Return tokens per block and number of layers for this block size; layers have at most 64 KiB."""
    layers = max(1, block_bytes // (LAYER_TOKENS * TOKEN_BYTES))
    return block_bytes // layers // TOKEN_BYTES, layers


def draw_plan(num_moves: int, in_runs: bool, rng: random.Random) -> list[BlockMove]:
    """Return moves between 2 * num_moves blocks: single random blocks, or runs of RUN_BLOCKS."""
    length = RUN_BLOCKS if in_runs else 1
    firsts = rng.sample(range(0, 2 * num_moves, length), 2 * num_moves // length)
    pairs = zip(firsts[::2], firsts[1::2], strict=True)
    return [
        BlockMove(BlockId(source + i), BlockId(target + i)) for source, target in pairs for i in range(length)
    ]


def time_on_cpu(call: Callable[[], None]) -> Sample:
    def sample() -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e6

    return sample


def time_on_gpu(call: Callable[[], None]) -> Sample:
    """Measure from the call to the end of its work on the device, including checks and launches."""
    import torch

    def sample() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1e6

    return sample


def make_storage(block_bytes: int, num_blocks: int, layout: str, device: str, copy: CopyBlocks) -> KVStorage:
    """Return a storage whose pages have all been written."""
    block_size, layers = choose_sizes(block_bytes)
    storage = KVStorage.allocate(
        num_blocks, block_size, layers, HEADS, HEAD_SIZE, "float16", device, layout, copy=copy
    )
    for tensor in storage.tensors:
        tensor[...] = 1
    return storage


def samples_on_cpu(storage: KVStorage, plan: list[BlockMove]) -> dict[str, Sample]:
    block_bytes = storage.block_bytes
    # All tensors are part of one allocation, which starts here.
    base = int(storage.segments.bases.min())
    half = len(plan) * block_bytes
    from_to = [(base + source * block_bytes, base + target * block_bytes) for source, target in plan]
    spans = [
        (address + source * stride, address + target * stride, span)
        for address, stride, span, _ in storage.segments.to_segments()
        for source, target in plan
    ]

    def move_each_span() -> None:
        for source, target, span in spans:
            ctypes.memmove(target, source, span)

    def move_each_block() -> None:
        for source, target in from_to:
            ctypes.memmove(target, source, block_bytes)

    return {
        "apply_moves": time_on_cpu(lambda: storage.apply_moves(plan)),
        "memmove, a call a span": time_on_cpu(move_each_span),
        "memmove, a call a block": time_on_cpu(move_each_block),
        "memmove, one call": time_on_cpu(lambda: void(ctypes.memmove(base, base + half, half))),
    }


def samples_on_gpu(storage: KVStorage, plan: list[BlockMove]) -> dict[str, Sample]:
    import torch

    from kv_pool.storage.copy_torch import copy_by_torch

    tensor = storage.tensors[0]
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    half = len(plan) * storage.block_bytes
    by_torch = KVStorage.wrap(storage.tensors, storage.layout, copy=copy_by_torch)
    return {
        "apply_moves, triton": time_on_gpu(lambda: storage.apply_moves(plan)),
        "apply_moves, torch": time_on_gpu(lambda: by_torch.apply_moves(plan)),
        "copy_, one call": time_on_gpu(lambda: void(flat[:half].copy_(flat[half : 2 * half]))),
    }


def void(_: object) -> None:
    """Discard a result."""


def find_gpu_copy() -> CopyBlocks:
    from kv_pool.storage.copy_triton import get_triton_copy

    return get_triton_copy()


def measure(block_bytes: int, layout: str, in_runs: bool, options: argparse.Namespace) -> dict[str, Any]:
    num_moves = min(options.moves, options.memory_mib * 2**20 // (2 * block_bytes))
    num_moves -= num_moves % RUN_BLOCKS
    on_gpu = options.device != "cpu"
    copy = find_gpu_copy() if on_gpu else copy_on_cpu
    storage = make_storage(block_bytes, 2 * num_moves, layout, options.device, copy)
    plan = draw_plan(num_moves, in_runs, random.Random(options.seed))
    samples = (samples_on_gpu if on_gpu else samples_on_cpu)(storage, plan)
    order = f"in runs of {RUN_BLOCKS}" if in_runs else "scattered"
    title = f"{num_moves} blocks of {block_bytes // 1024} KiB {order}, {LAYOUTS[layout]}"
    row = interleave(title, "ms", samples, options.runs)
    span = int(storage.segments.spans[0])
    print(f"{title}, {len(storage.segments)} spans of {span // 1024} KiB")
    figures = {}
    medians = {name: summarize(values)[1] for name, values in row.samples.items()}
    for name, values in row.samples.items():
        low, median, high = summarize(values)
        rate = num_moves * block_bytes / median / 1e6
        shares = {other: medians[other] / median for other in list(medians)[1:] if other != name}
        figures[name] = {"median": median, "p10": low, "p90": high, "gb_per_s": rate, "rate_over": shares}
        baselines = [other for other in medians if not other.startswith("apply_moves")]
        shown = "".join(f"{medians[other] / median:>12.0%}" for other in baselines)
        print(f"    {name:26}{median:>9.2f}{low:>9.2f}{high:>9.2f}{rate:>9.1f}{shown}", flush=True)
    return {
        "title": title,
        "spans": len(storage.segments),
        "span_bytes": span,
        "num_moves": num_moves,
        "block_bytes": block_bytes,
        "figures": figures,
        "samples_ms": row.samples,
    }


def describe_device(options: argparse.Namespace) -> dict[str, Any]:
    told = describe_run([], ("kv_pool", "numpy", "torch", "triton"))
    if options.device != "cpu":
        import torch

        told["gpu"] = torch.cuda.get_device_name(options.device)
    return told


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...")
    parser.add_argument("--moves", type=int, default=1_000, help="maximum number of blocks per plan")
    parser.add_argument("--memory-mib", type=int, help="size of the storage; limits the length of plans")
    parser.add_argument("--kib", type=int, nargs="+", default=[16, 64, 256, 2048], help="sizes of a block")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0, help="seed of the plans")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 32 moves, 2 runs")
    options = parser.parse_args()
    if options.quick:
        options.moves, options.runs = 32, 2
    if options.memory_mib is None:
        options.memory_mib = 1024 if options.device == "cpu" else 8192
    if min(options.kib) < 4 or 2 * RUN_BLOCKS * max(options.kib) > options.memory_mib * 1024:
        parser.error(f"blocks of 4 KiB or more, and memory for {2 * RUN_BLOCKS} of them")
    return options


def main() -> None:
    options = parse_options()
    provenance = describe_device(options)
    for key, value in provenance.items():
        listed = (
            ", ".join(f"{name} {number}" for name, number in value.items()) if key == "versions" else value
        )
        print(f"{key:22}{listed}")
    names = ["ms", "p10", "p90", "GB/s"]
    columns = "".join(f"{name:>9}" for name in names)
    baselines = ["of a span", "of a block", "of one call"] if options.device == "cpu" else ["of copy_"]
    columns += "".join(f"{name:>12}" for name in baselines)
    print(f"\n{'':30}{columns}")
    rows = [
        measure(kib * 1024, layout, in_runs, options)
        for kib in options.kib
        for layout in LAYOUTS
        for in_runs in (False, True)
    ]
    if options.json:
        write_results(options.json, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
