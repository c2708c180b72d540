"""Compare moving blocks with copying as many bytes. See benchmarks/README.md."""

import ctypes
import random
from collections.abc import Callable
from typing import Any

from measuring import (
    Options,
    Sample,
    interleave,
    make_parser,
    read_options,
    start_run,
    summarize,
    time_ms,
    write_results,
)

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
        "apply_moves": time_ms(lambda: storage.apply_moves(plan)),
        "memmove, a call a span": time_ms(move_each_span),
        "memmove, a call a block": time_ms(move_each_block),
        "memmove, one call": time_ms(lambda: ctypes.memmove(base, base + half, half)),
    }


def samples_on_gpu(storage: KVStorage, plan: list[BlockMove]) -> dict[str, Sample]:
    """Measure from the call to the end of its work on the device, including checks and launches."""
    import torch

    from kv_pool.storage.copy_torch import copy_by_torch

    tensor = storage.tensors[0]
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    half = len(plan) * storage.block_bytes
    by_torch = KVStorage.wrap(storage.tensors, storage.layout, copy=copy_by_torch)

    def time_on_gpu(call: Callable[[], object]) -> Sample:
        return time_ms(lambda: (call(), torch.cuda.synchronize()), torch.cuda.synchronize)

    return {
        "apply_moves, triton": time_on_gpu(lambda: storage.apply_moves(plan)),
        "apply_moves, torch": time_on_gpu(lambda: by_torch.apply_moves(plan)),
        "copy_, one call": time_on_gpu(lambda: flat[:half].copy_(flat[half : 2 * half])),
    }


def find_gpu_copy() -> CopyBlocks:
    from kv_pool.storage.copy_triton import copy_by_triton

    return copy_by_triton


def measure(block_bytes: int, layout: str, in_runs: bool, options: Options) -> dict[str, Any]:
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


def parse_options() -> Options:
    parser = make_parser(__doc__, runs=11)
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0, ...")
    parser.add_argument("--moves", type=int, default=1_000, help="maximum number of blocks per plan")
    parser.add_argument("--memory-mib", type=int, help="size of the storage; limits the length of plans")
    parser.add_argument("--kib", type=int, nargs="+", default=[16, 64, 256, 2048], help="sizes of a block")
    options = read_options(parser, moves=32, runs=2)
    if options.memory_mib is None:
        options.memory_mib = 1024 if options.device == "cpu" else 8192
    if min(options.kib) < 4 or 2 * RUN_BLOCKS * max(options.kib) > options.memory_mib * 1024:
        parser.error(f"blocks of 4 KiB or more, and memory for {2 * RUN_BLOCKS} of them")
    return options


def main() -> None:
    options = parse_options()
    facts = {}
    if options.device != "cpu":
        import torch

        facts["gpu"] = torch.cuda.get_device_name(options.device)
    provenance = start_run(options, "torch", "triton", **facts)
    baselines = ["of a span", "of a block", "of one call"] if options.device == "cpu" else ["of copy_"]
    columns = "".join(f"{name:>9}" for name in ("ms", "p10", "p90", "GB/s"))
    print(f"{'':30}{columns}" + "".join(f"{name:>12}" for name in baselines))
    rows = [
        measure(kib * 1024, layout, in_runs, options)
        for kib in options.kib
        for layout in LAYOUTS
        for in_runs in (False, True)
    ]
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
