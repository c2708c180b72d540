"""Measure the cost of a hit in a lower tier and of a step that offloads blocks. See benchmarks/README.md."""

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from request_runs import BenchRequest

from kv_pool import BlockPool
from kv_pool.core.block_keys import make_block_hash_with_group_id
from kv_pool.ids import BlockHash, BlockHashWithGroupId, BlockId, GroupId, RequestId
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.disk_tier import DiskTier
from kv_pool.tiers.host_tier import HostTier
from kv_pool.tiers.tier import Tier
from kv_pool.tiers.tiered_cache import TieredCache

BLOCK_SIZE = 16


def list_keys(request: BenchRequest) -> list[BlockHashWithGroupId]:
    return [make_block_hash_with_group_id(block_hash, GroupId(0)) for block_hash in request.block_hashes]


class Bench:
    """A pool with its blocks in host memory, and lower tiers."""

    def __init__(
        self, num_blocks: int, block_bytes: int, make_tiers: Callable[["Bench"], list[Tier]]
    ) -> None:
        self.num_blocks = num_blocks
        self.array = np.ones((num_blocks + 1, block_bytes), np.uint8)
        self.storage = BlockStorage.wrap_state([self.array])
        self.layout = BlockLayout.describe(self.storage, BLOCK_SIZE)
        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
        self.cache = TieredCache(self.pool, self.storage, make_tiers(self), max_prefetch_blocks=num_blocks)
        self.ids = [BlockId(number) for number in range(1, num_blocks + 1)]
        self.fill()

    def fill(self) -> list[BlockHashWithGroupId]:
        """Reuse every block and cache it under a new key; the old content is pending. Return the keys."""
        request: Any = BenchRequest([], [BlockHash(os.urandom(32)) for _ in range(self.num_blocks)])
        blocks = self.pool.get_new_blocks(self.num_blocks)
        self.pool.cache_full_blocks(request, blocks, 0, self.num_blocks, BLOCK_SIZE, GroupId(0))
        self.pool.free_blocks(blocks)
        return list_keys(request)


class PlainFile:
    """Blocks in a file, read and written by plain calls: the baseline of a tier on disk."""

    def __init__(self, path: Path, array: Any) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.rows = list(array)
        self.stride = -(-array.shape[1] // 4096) * 4096

    def write(self) -> None:
        for place, row in enumerate(self.rows):
            os.pwrite(self.file, row, place * self.stride)

    def read(self) -> None:
        for place, row in enumerate(self.rows):
            os.preadv(self.file, [row], place * self.stride)

    def drop(self) -> None:
        drop_pages(self.file)


def drop_pages(file: int) -> None:
    """Sync a file and drop its pages from the page cache."""
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def memmove_blocks(target: Any, source: Any) -> Callable[[], None]:
    """Return a function that copies all rows of one array over another's, one call each."""
    pairs = [(to.ctypes.data, row.ctypes.data) for to, row in zip(target, source, strict=True)]
    num_bytes = source.shape[1]

    def move() -> None:
        for to_address, from_address in pairs:
            ctypes.memmove(to_address, from_address, num_bytes)

    return move


def make_samples(num_blocks: int, block_bytes: int, folder: Path) -> dict[str, dict[str, Sample]]:
    """Return the samples by title: the tier's first, then its baseline's."""
    to_host = Bench(num_blocks, block_bytes, lambda bench: [HostTier(2 * num_blocks, bench.storage)])
    other = np.ones((num_blocks, block_bytes), np.uint8)
    move = memmove_blocks(other, to_host.array[1:])
    to_host.cache.flush()
    in_host = Bench(num_blocks, block_bytes, lambda bench: [HostTier(2 * num_blocks, bench.storage)])
    hit = in_host.fill()
    in_host.fill()
    in_host.cache.flush()

    to_disk = Bench(
        num_blocks,
        block_bytes,
        lambda bench: [
            HostTier(num_blocks, bench.storage),
            DiskTier(folder / "written", 3 * num_blocks, bench.layout),
        ],
    )
    for _ in range(6):  # fill every tier, so that each step evicts as many blocks as it stores
        to_disk.fill()
        to_disk.cache.flush()
    plain = PlainFile(folder / "plain", other)
    plain.write()

    on_disk = Bench(
        num_blocks,
        block_bytes,
        lambda bench: [
            HostTier(1, bench.storage),
            DiskTier(folder / "read", 2 * num_blocks, bench.layout),
        ],
    )
    read_hit = on_disk.fill()
    on_disk.fill()
    on_disk.cache.flush()
    disk = on_disk.cache.tiers[1]
    assert isinstance(disk, DiskTier)
    kept = [key for key in read_hit if key in disk]
    ids = on_disk.ids[: len(kept)]
    blocks_file = disk._files._blocks  # noqa: SLF001 (reads the files directly)

    def move_and_write() -> None:
        move()
        plain.write()

    def read_back(cache: TieredCache, keys: list[BlockHashWithGroupId], block_ids: list[BlockId]) -> None:
        failed = cache.load(keys, block_ids)
        assert not failed

    ahead = Bench(
        num_blocks,
        block_bytes,
        lambda bench: [
            HostTier(2 * num_blocks, bench.storage),
            DiskTier(folder / "ahead", 2 * num_blocks, bench.layout),
        ],
    )
    asked = ahead.fill()
    for _ in range(3):
        ahead.fill()
        ahead.cache.flush()

    def ask_ahead() -> None:
        """Prefetch blocks that are on disk only, and wait until the thread has read them."""
        host, disk = ahead.cache.tiers
        assert all(key in disk for key in asked)
        host.clear()
        ahead.cache.prefetch(RequestId("bench"), asked)
        ahead.cache.wait_for_prefetch()

    return {
        "write back to host memory": {
            "flush": time_ms(to_host.cache.flush, to_host.fill),
            "memmove": time_ms(move),
        },
        "hit in host memory": {
            "load": time_ms(lambda: read_back(in_host.cache, hit, in_host.ids)),
            "memmove": time_ms(move),
        },
        "one block hit in host memory": {
            "load": time_ms(lambda: read_back(in_host.cache, hit[:1], in_host.ids[:1])),
            "memmove": time_ms(memmove_blocks(other[:1], to_host.array[1:2])),
        },
        "write back to host memory, as many go on to disk": {
            "flush": time_ms(to_disk.cache.flush, to_disk.fill),
            "memmove and pwrite": time_ms(move_and_write),
        },
        "hit on disk, in the page cache": {
            "load": time_ms(lambda: read_back(on_disk.cache, kept, ids)),
            "preadv": time_ms(plain.read),
        },
        "one block hit on disk, in the page cache": {
            "load": time_ms(lambda: read_back(on_disk.cache, kept[:1], ids[:1])),
            "preadv": time_ms(lambda: os.preadv(plain.file, [plain.rows[0]], 0)),
        },
        "hit on disk, dropped from the page cache": {
            "load": time_ms(lambda: read_back(on_disk.cache, kept, ids), lambda: drop_pages(blocks_file)),
            "preadv": time_ms(plain.read, plain.drop),
        },
        "step that takes over what was read ahead": {
            "flush": time_ms(ahead.cache.flush, ask_ahead),
            "memmove": time_ms(move),
        },
    }


def measure(num_blocks: int, block_bytes: int, options: Options) -> list[dict[str, Any]]:
    print(f"{num_blocks} blocks of {block_bytes // 1024} KiB")
    told = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for title, samples in make_samples(num_blocks, block_bytes, Path(folder)).items():
            count = 1 if title.startswith("one block") else num_blocks
            row = interleave(title, "ms", samples, options.runs)
            (name, ours), (other, baseline) = row.samples.items()
            low, median, high = summarize(ours)
            share = summarize([theirs / mine for theirs, mine in zip(baseline, ours, strict=True)])[1]
            rate = count * block_bytes / median / 1e6
            figures = {"ms": median, "p10": low, "p90": high, "us_per_block": median * 1e3 / count}
            figures |= {"gb_per_s": rate, "baseline_ms": summarize(baseline)[1], "of_baseline": share}
            numbers = f"{median:>9.3f}{low:>9.3f}{high:>9.3f}{figures['us_per_block']:>10.1f}{rate:>8.2f}"
            print(f"  {title:50}{numbers}{figures['baseline_ms']:>9.3f}{share:>8.0%}  {other}", flush=True)
            told.append(
                {
                    "title": title,
                    "num_blocks": count,
                    "block_bytes": block_bytes,
                    "call": name,
                    "baseline": other,
                    "figures": figures,
                    "samples_ms": row.samples,
                }
            )
    return told


def main() -> None:
    parser = make_parser(__doc__, runs=15, seeded=False)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256, 2048], help="sizes of a block")
    parser.add_argument("--mib", type=int, default=64, help="bytes of blocks moved at a time")
    parser.add_argument("--folder", help="folder of the disk tiers; default: the system's temporary folder")
    options = read_options(parser, mib=4, runs=2)
    if min(options.kib) < 4 or max(options.kib) > options.mib * 1024:
        parser.error("--kib must be 4 or more, and --mib at least one block")
    provenance = start_run(options)
    names = f"{'ms':>9}{'p10':>9}{'p90':>9}{'us/block':>10}{'GB/s':>8}{'beside':>9}{'rate':>8}"
    print(f"{'':52}{names}")
    rows = [row for kib in options.kib for row in measure(options.mib * 1024 // kib, kib * 1024, options)]
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
