"""Compare a migration with only reading the same blocks. See benchmarks/README.md."""

import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from measuring import make_parser, read_cpu_s, read_options, start_run, write_results

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.ids import BlockId, NodeName, RequestId, TransferId
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.manager_sequences import ManagerSequences
from kv_pool.migration.messages import CancelTransfer, Offer, PrepareTransfer, SequenceSubject
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.sequences import SequenceOwner
from kv_pool.migration.transfer_backend import TransferBackend
from kv_pool.storage import KVStorage
from kv_pool.storage.checksums import checksum_blocks

KIB = 1024
BLOCK_SIZE = 16
SECRET = b"of this benchmark only"
HASHER = BlockHasher("sha256", block_size=BLOCK_SIZE)
SOURCE, TARGET, REQUEST = NodeName("source"), NodeName("target"), RequestId("request")


def make_backend(name: str, storage: KVStorage) -> TransferBackend:
    if name == "tcp":
        return TcpBackend(storage)
    from kv_pool.migration.backends.nixl import NixlBackend

    return NixlBackend(storage)


class BenchNode(SequenceOwner[RequestId]):
    """A node with an engine of at most one request."""

    def __init__(
        self, name: NodeName, backend: str, block_bytes: int, num_blocks: int, scattered: bool
    ) -> None:
        # One layer, with K and V adjacent: a block is contiguous.
        self.storage = KVStorage.allocate(
            num_blocks + 1,
            BLOCK_SIZE,
            1,
            block_bytes // (2 * BLOCK_SIZE * 2 * 64),
            64,
            "float16",
            layout="L|B2NHD",
        )
        for tensor in self.storage.tensors:
            tensor.view(np.uint16)[...] = 1 + np.arange(tensor.shape[0], dtype=np.uint16).reshape(
                -1, *[1] * (tensor.ndim - 1)
            )
        self.pool = BlockPool(num_blocks + 1, True, BLOCK_SIZE)
        if scattered:
            blocks = self.pool.get_new_blocks(num_blocks)
            self.pool.free_blocks([blocks[at] for at in np.random.default_rng(0).permutation(num_blocks)])
        self.manager = KVCacheManager(self.pool)
        self.site = PoolSite(ManagerSequences(self.manager, self.storage), hasher=HASHER, owner=self)
        self.adopted = RequestId("")
        self.backend = make_backend(backend, self.storage)
        self.migrator = Migrator(
            name, self.site, backends=[self.backend], secret=SECRET, listen="127.0.0.1:0"
        )
        self.migrator.start()

    def on_arrived(self, request_id: RequestId, state: bytes, /) -> None:
        self.adopted = request_id

    def forget(self) -> None:
        """Drop all cached content, so that it must be read again."""
        with self.site.lock:
            tables = self.manager.pop_tables(self.adopted)
            self.pool.free_blocks([block for table in tables for block in reversed(table.blocks)])
            assert self.manager.reset_prefix_cache()


def run_source(pipe: Connection, backend: str, block_bytes: int, num_blocks: int, scattered: bool) -> None:
    node = BenchNode(SOURCE, backend, block_bytes, num_blocks, scattered)
    request = Request(REQUEST, range(num_blocks * BLOCK_SIZE), HASHER)
    assert node.manager.allocate_slots(request, request.num_tokens) is not None
    pipe.send(node.migrator.address)
    pipe.recv()


def read_raw(node: BenchNode, cpu: Callable[[], float]) -> tuple[float, float, float]:
    """Return seconds for a plain read of all blocks, its CPU seconds in both processes, and seconds for
    checksums of the same number of blocks."""
    description = node.migrator.ask(SOURCE)
    reader = node.backend.open(SOURCE, description.backends[node.backend.name])
    transfer_id = TransferId(secrets.token_bytes(16))
    links = node.migrator._links  # noqa: SLF001 (counts the bytes sent)
    prepare = PrepareTransfer(transfer_id, SequenceSubject(REQUEST), False, node.site.layout, TARGET)
    offer = links.call(SOURCE, prepare, 5.0)
    assert isinstance(offer, Offer)
    ids = [block.block_id for block in offer.blocks]
    local_ids = [BlockId(number) for number in range(1, len(ids) + 1)]
    reader.read(transfer_id, ids[:1], local_ids[:1], time.monotonic() + 30)  # connects
    cpu_before, started = cpu(), time.perf_counter()
    reader.read(transfer_id, ids, local_ids, time.monotonic() + 60)
    raw_s, raw_cpu_s = time.perf_counter() - started, cpu() - cpu_before
    started = time.perf_counter()
    checksum_blocks(node.storage, local_ids)
    checksum_s = time.perf_counter() - started
    reader.close()
    links.call(SOURCE, CancelTransfer(transfer_id), 5.0)
    return raw_s, raw_cpu_s, checksum_s


def migrate(node: BenchNode, cpu: Callable[[], float]) -> tuple[float, float]:
    """Return seconds for all phases of a migration, and CPU seconds of both processes."""
    cpu_before, started = cpu(), time.perf_counter()
    node.migrator.fetch(SequenceSubject(REQUEST), SOURCE).wait(60)
    elapsed, cpu_s = time.perf_counter() - started, cpu() - cpu_before
    node.forget()
    return elapsed, cpu_s


def measure(backend: str, block_bytes: int, total_bytes: int, scattered: bool, runs: int) -> dict[str, Any]:
    num_blocks = max(4, total_bytes // block_bytes)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    arguments = (theirs, backend, block_bytes, num_blocks, scattered)
    process = context.Process(target=run_source, args=arguments, daemon=True)
    process.start()
    node = BenchNode(TARGET, backend, block_bytes, num_blocks, False)
    node.migrator.peers.add(SOURCE, pipe.recv())
    raw, raw_cpu, whole, whole_cpu, checksums = [], [], [], [], []

    def cpu() -> float:
        return time.process_time() + read_cpu_s(process.pid or 0)

    for run in range(runs + 1):
        raw_s, raw_cpu_s, checksum_s = read_raw(node, cpu)
        whole_s, whole_cpu_s = migrate(node, cpu)
        if run:  # the first run connects and touches pages for the first time
            raw.append(raw_s)
            raw_cpu.append(raw_cpu_s)
            whole.append(whole_s)
            whole_cpu.append(whole_cpu_s)
            checksums.append(checksum_s)
    node.migrator.stop()
    pipe.send(None)
    process.join()
    num_bytes = num_blocks * block_bytes
    return {
        "backend": backend,
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "scattered": scattered,
        "raw_gb_s": num_bytes / statistics.median(raw) / 1e9,
        "whole_gb_s": num_bytes / statistics.median(whole) / 1e9,
        "checksum_gb_s": num_bytes / statistics.median(checksums) / 1e9,
        "share": statistics.median(raw) / statistics.median(whole),
        "share_of_fastest": min(raw) / min(whole),
        "whole_ms": statistics.median(whole) * 1e3,
        "raw_cpu_ms": statistics.mean(raw_cpu) * 1e3,
        "whole_cpu_ms": statistics.mean(whole_cpu) * 1e3,
        "runs": runs,
    }


def main() -> None:
    parser = make_parser(__doc__, runs=9, seeded=False)
    parser.add_argument("--backend", default="tcp", choices=["tcp", "nixl"])
    parser.add_argument("--total-mib", type=int, default=128)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[16, 64, 256, 1024, 2048])
    options = read_options(parser, total_mib=8, block_kib=[64, 256], runs=2)
    provenance = start_run(options, "nixl")
    print(
        f"{'block':>9} {'ids':>9} {'raw':>6} {'whole':>6} {'checks':>6}  GB/s  "
        "share of raw, of the fastest   CPU ms, both processes"
    )
    rows = []
    for block_kib in options.block_kib:
        for scattered in (False, True):
            row = measure(
                options.backend, block_kib * KIB, options.total_mib * KIB * KIB, scattered, options.runs
            )
            rows.append(row)
            print(
                f"{block_kib:>5} KiB {'scattered' if scattered else 'in a run':>9} {row['raw_gb_s']:>6.2f} "
                f"{row['whole_gb_s']:>6.2f} {row['checksum_gb_s']:>6.1f}       "
                f"{row['share']:>12.0%} {row['share_of_fastest']:>15.0%}   "
                f"{row['raw_cpu_ms']:>6.0f} -> {row['whole_cpu_ms']:.0f}",
                flush=True,
            )
    write_results(options, {"provenance": provenance, "rows": rows})


if __name__ == "__main__":
    main()
