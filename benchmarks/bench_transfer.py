"""Compare reading another node's blocks with the raw transfer engine. See benchmarks/README.md."""

import contextlib
import ctypes
import importlib.util
import json
import random
import secrets
import socket
import subprocess
import sys
import threading
import time
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from bench_block_moves import HEAD_SIZE, HEADS, LAYOUTS, RUN_BLOCKS, choose_sizes
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

from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.migration.addresses import bind_listener, connect_to, format_address, tune
from kv_pool.migration.backends.in_process import InProcessBackend
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.bulk_listener import BulkListener
from kv_pool.migration.messages import Cancelled, OpenBulk
from kv_pool.migration.remote_calls import Bulk, CallServer, RemoteCalls
from kv_pool.migration.transfer_backend import BlockReader, BulkBackend, ConnectBulk, TransferBackend
from kv_pool.storage import KVStorage
from kv_pool.storage.checksums import checksum_blocks
from kv_pool.storage.segments import split_alike

TRANSFER_ID = TransferId(b"benchmark".ljust(16))
SOURCE, TARGET = NodeName("source"), NodeName("target")
SEED = 0
LONG_S = 60.0
HAS_NIXL = importlib.util.find_spec("nixl") is not None


# ---- both processes ------------------------------------------------------------------------------


def make_storage(block_bytes: int, num_blocks: int, layout: str, seed: int) -> KVStorage:
    """Return a storage of random bytes in one allocation."""
    block_size, layers = choose_sizes(block_bytes)
    storage = KVStorage.allocate(num_blocks, block_size, layers, HEADS, HEAD_SIZE, layout=layout)
    view_memory(storage)[:] = np.random.default_rng(seed).bytes(num_blocks * block_bytes)
    return storage


def view_memory(storage: KVStorage) -> memoryview:
    """Return all of its memory; its tensors are one allocation."""
    num_bytes = storage.num_blocks * storage.block_bytes
    memory = (ctypes.c_ubyte * num_bytes).from_address(int(storage.segments.bases.min()))
    return memoryview(memory).cast("B")


def make_backends(storage: KVStorage) -> dict[str, TransferBackend]:
    backends: list[TransferBackend] = [TcpBackend(storage)]
    if HAS_NIXL:
        from kv_pool.migration.backends.nixl import NixlBackend

        backends.append(NixlBackend(storage))
    return {backend.name: backend for backend in backends}


def make_connect(address: str, secret: bytes) -> ConnectBulk:
    """Return a function that connects to the node at this address, whatever its name."""

    calls: list[RemoteCalls] = []

    def connect(name: NodeName, message: OpenBulk, timeout_s: float) -> Bulk:
        if not calls:
            calls.append(RemoteCalls(address, secret, TARGET))
        return calls[0].connect_bulk(message, timeout_s)

    return connect


def allow_all(transfer_id: TransferId, block_ids: object) -> None:
    """Accept every transfer."""


# ---- the source's process ------------------------------------------------------------------------


def serve(block_bytes: int, num_blocks: int, layout: str, secret: bytes) -> None:
    """Serve a storage by every backend, and raw, until standard input ends."""
    storage = make_storage(block_bytes, num_blocks, layout, SEED)
    backends = make_backends(storage)
    bulk = BulkListener(
        {name: one.make_sender for name, one in backends.items() if isinstance(one, BulkBackend)}
    )
    for backend in backends.values():
        backend.attach(allow_all, make_connect("", secret))
    with (
        CallServer("127.0.0.1:0", secret, lambda *_: Cancelled(), bulk=bulk) as server,
        bind_listener("127.0.0.1:0") as listener,
    ):
        threading.Thread(target=serve_raw, args=(listener, view_memory(storage)), daemon=True).start()
        told = {
            "address": server.address,
            "raw_address": format_address(*listener.getsockname()),
            "descriptions": {name: backend.describe().hex() for name, backend in backends.items()},
        }
        print("source", json.dumps(told), flush=True)
        sys.stdin.read()
        for backend in backends.values():
            backend.close()


def serve_raw(listener: socket.socket, memory: memoryview) -> None:
    """Send the requested number of bytes, from the start of the memory, to one client."""
    connection, _ = listener.accept()
    tune(connection)
    while asked := connection.recv(8, socket.MSG_WAITALL):
        connection.sendall(memory[: int.from_bytes(asked)])


@contextlib.contextmanager
def start_source(block_bytes: int, num_blocks: int, layout: str, secret: bytes) -> Iterator[dict[str, Any]]:
    arguments = [__file__, "--serve", str(block_bytes), str(num_blocks), layout]
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(secret.hex() + "\n")
            process.stdin.flush()
            told = next(line for line in process.stdout if line.startswith("source "))
            yield json.loads(told.removeprefix("source "))
        finally:
            process.stdin.close()
            process.stdout.close()


# ---- the target's process ------------------------------------------------------------------------


class Target:
    """The target's storages, and a reader for each backend."""

    def __init__(self, source: dict[str, Any], storage: KVStorage, local: KVStorage, secret: bytes) -> None:
        self.source = source
        self.storage = storage
        self.local = local
        self.secret = secret
        self.backends = make_backends(storage)
        self.local_backend = InProcessBackend(local)
        self.backends["in_process"] = InProcessBackend(storage)
        descriptions = {name: bytes.fromhex(told) for name, told in source["descriptions"].items()}
        self.descriptions = descriptions | {"in_process": self.local_backend.describe()}
        connect = make_connect(str(source["address"]), secret)
        self.local_backend.attach(allow_all, connect)
        for backend in self.backends.values():
            backend.attach(allow_all, connect)
        self.raw = connect_to(source["raw_address"], LONG_S)
        self.readers = {name: self.open(name, backend) for name, backend in self.backends.items()}

    def open(self, name: str, backend: TransferBackend) -> BlockReader:
        return backend.open(SOURCE, self.descriptions[name])

    def close(self) -> None:
        self.raw.close()
        for reader in self.readers.values():
            reader.close()
        for backend in (*self.backends.values(), self.local_backend):
            backend.close()


def draw_ids(count: int, in_runs: bool, rng: random.Random) -> list[BlockId]:
    """Return `count` of 2 * `count` blocks: single random blocks, or runs of RUN_BLOCKS."""
    length = RUN_BLOCKS if in_runs else 1
    firsts = rng.sample(range(0, 2 * count, length), count // length)
    return [BlockId(first + i) for first in firsts for i in range(length)]


def list_samples(target: Target, sources: list[BlockId], targets: list[BlockId]) -> dict[str, Sample]:
    """Return samples of each backend's read, its raw engine, memmove and checksums."""
    num_bytes = len(sources) * target.storage.block_bytes
    into = view_memory(target.storage)

    def read_by(name: str) -> Callable[[], object]:
        reader = target.readers[name]
        return lambda: reader.read(TRANSFER_ID, sources, targets, time.monotonic() + LONG_S)

    def read_raw_tcp() -> None:
        target.raw.sendall(num_bytes.to_bytes(8))
        rest = into[:num_bytes]
        while rest:
            rest = rest[target.raw.recv_into(rest) :]

    there, here = target.local.segments, target.storage.segments
    spans = [
        (from_base + source * from_stride, to_base + place * to_stride, span)
        for (from_base, from_stride, span, _), (to_base, to_stride, _, _) in zip(
            there.to_segments(), here.to_segments(), strict=True
        )
        for source, place in zip(sources, targets, strict=True)
    ]

    def move_each_span() -> None:
        for source, place, span in spans:
            ctypes.memmove(place, source, span)

    first, second = int(there.bases.min()), int(here.bases.min())
    samples = {
        "in process": time_ms(read_by("in_process")),
        "memmove, a call a span": time_ms(move_each_span),
        "tcp": time_ms(read_by("tcp")),
        "tcp, raw": time_ms(read_raw_tcp),
    }
    if HAS_NIXL:
        samples["nixl"] = time_ms(read_by("nixl"))
        samples["nixl, raw"] = time_ms(prepare_raw_nixl(target, sources, targets))
    samples["memmove, one call"] = time_ms(lambda: ctypes.memmove(second, first, num_bytes))
    samples["checksums of the blocks"] = time_ms(lambda: checksum_blocks(target.storage, targets))
    return samples


def prepare_raw_nixl(target: Target, sources: list[BlockId], targets: list[BlockId]) -> Callable[[], None]:
    """Read the same descriptors by NIXL's own interface, with another agent of the same configuration."""
    import msgspec
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    from kv_pool.migration.backends.nixl import NixlDescription, make_table

    peer = msgspec.msgpack.decode(target.descriptions["nixl"], type=NixlDescription)
    config = nixl_agent_config(
        backends=["UCX"], enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    )
    agent = nixl_agent(secrets.token_hex(8), config)
    memory = view_memory(target.storage)
    base = int(target.storage.segments.bases.min())
    agent.register_memory([(base, len(memory), 0, "")], "DRAM")
    name = agent.add_remote_agent(peer.metadata).decode()
    tables = split_alike(make_table(peer), target.storage.segments)
    lists, ids = [], []
    for table, whose, block_ids in zip(tables, (name, "NIXL_INIT_AGENT"), (sources, targets), strict=True):
        rows = [(begin, span, 0, step, table.num_blocks) for begin, step, span, _ in table.to_segments()]
        lists.append(agent.prep_xfer_dlist(whose, np.array(rows, np.uint64), "DRAM"))
        first = np.arange(len(table))[:, None] * table.num_blocks
        ids.append((first + np.array(block_ids)[None, :]).reshape(-1).astype(np.int32))

    def read() -> None:
        handle = agent.make_prepped_xfer("READ", lists[1], ids[1], lists[0], ids[0])
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL reports {state}")
        handle.release()

    return read


COLUMNS = {"raw": "of raw", "raw_at_p10": "p10 of p10", "memmove": "of memmove"}
RAW = {"in process": "memmove, a call a span", "tcp": "tcp, raw", "nixl": "nixl, raw"}


def measure(target: Target, layout: str, in_runs: bool, options: Options) -> dict[str, Any]:
    block_bytes = target.storage.block_bytes
    count = target.storage.num_blocks // 2
    rng = random.Random(options.seed)
    sources, targets = draw_ids(count, in_runs, rng), draw_ids(count, in_runs, rng)
    samples = list_samples(target, sources, targets)
    for name, reader in target.readers.items():
        view_memory(target.storage)[:] = bytes(target.storage.num_blocks * block_bytes)
        reader.read(TRANSFER_ID, sources, targets, time.monotonic() + LONG_S)
        if (checksum_blocks(target.storage, targets) != checksum_blocks(target.local, sources)).any():
            raise SystemExit(f"{name} has read other bytes than the source's")
    order = f"in runs of {RUN_BLOCKS}" if in_runs else "scattered"
    span = int(target.storage.segments.spans[0])
    title = f"{count} blocks of {block_bytes // 1024} KiB {order}, {LAYOUTS[layout]}"
    row = interleave(title, "ms", samples, options.runs)
    print(f"{title}, {len(target.storage.segments)} spans of {span // 1024} KiB")
    lows = {name: summarize(values)[0] for name, values in row.samples.items()}
    medians = {name: summarize(values)[1] for name, values in row.samples.items()}
    figures = {}
    for name, values in row.samples.items():
        low, median, high = summarize(values)
        rate = count * block_bytes / median / 1e6
        shares = {"memmove": medians["memmove, one call"] / median}
        if name in RAW:
            shares["raw"] = medians[RAW[name]] / median
            shares["raw_at_p10"] = lows[RAW[name]] / low
        figures[name] = {"median": median, "p10": low, "p90": high, "gb_per_s": rate, "rate_over": shares}
        shown = "".join(f"{shares[over]:>12.0%}" if over in shares else " " * 12 for over in COLUMNS)
        line = f"    {name:26}{median:>9.2f}{low:>9.2f}{high:>9.2f}{rate:>9.2f}{shown}"
        print(line, flush=True)
    return {
        "title": title,
        "spans": len(target.storage.segments),
        "span_bytes": span,
        "num_blocks": count,
        "block_bytes": block_bytes,
        "figures": figures,
        "samples_ms": row.samples,
    }


def measure_first_block(target: Target, options: Options) -> dict[str, Any]:
    """Return milliseconds until one block has arrived, with all objects created each time."""
    found: dict[str, dict[str, list[float]]] = {}
    makers = {name: type(backend) for name, backend in target.backends.items()}
    for _ in range(options.runs):
        for name, make in makers.items():
            steps = found.setdefault(name, {})
            start = time.perf_counter_ns()

            def note(step: str, since: int, steps: dict[str, list[float]] = steps) -> int:
                now = time.perf_counter_ns()
                steps.setdefault(step, []).append((now - since) / 1e6)
                return now

            backend = make(target.storage)
            backend.attach(allow_all, make_connect(str(target.source["address"]), target.secret))
            start = note("make the backend", start)
            reader = target.open(name, backend)
            start = note("open a reader", start)
            for step in ("first block", "next block"):
                reader.read(TRANSFER_ID, [BlockId(1)], [BlockId(1)], time.monotonic() + LONG_S)
                start = note(step, start)
            reader.close()
            backend.close()
            del reader, backend  # otherwise their release would count in the next measurement
    size = target.storage.block_bytes // 1024
    print(f"\nms until one block of {size} KiB is here")
    columns = ["make the backend", "open a reader", "first block", "next block"]
    print(f"{'':30}" + "".join(f"{column:>18}" for column in columns))
    for name, steps in found.items():
        print(f"    {name:26}" + "".join(f"{summarize(steps[column])[1]:>18.2f}" for column in columns))
    return {"block_bytes": target.storage.block_bytes, "samples_ms": found}


@contextlib.contextmanager
def make_target(block_bytes: int, num_blocks: int, layout: str) -> Iterator[Target]:
    secret = secrets.token_bytes(32)
    with start_source(block_bytes, num_blocks, layout, secret) as source:
        local = make_storage(block_bytes, num_blocks, layout, SEED)
        target = Target(source, make_storage(block_bytes, num_blocks, layout, SEED + 1), local, secret)
        try:
            yield target
        finally:
            target.close()


def parse_options() -> Options:
    parser = make_parser(__doc__, runs=15)
    parser.add_argument("--mib", type=int, default=64, help="MiB per read")
    parser.add_argument("--kib", type=int, nargs="+", default=[16, 64, 256, 2048], help="sizes of a block")
    parser.add_argument("--serve", nargs=3, help=SUPPRESS)
    options = read_options(parser, kib=[16, 256], runs=2, mib=8)
    if min(options.kib) < 4 or RUN_BLOCKS * max(options.kib) > options.mib * 1024:
        parser.error(f"--kib must be 4 or more, and --mib at least {RUN_BLOCKS} blocks")
    return options


def main() -> None:
    options = parse_options()
    if options.serve:
        block_bytes, num_blocks, layout = options.serve
        serve(int(block_bytes), int(num_blocks), layout, bytes.fromhex(sys.stdin.readline()))
        return
    provenance = start_run(options, "nixl")
    if not HAS_NIXL:
        print("NIXL is not installed; its rows are omitted")
    columns = "".join(f"{name:>9}" for name in ("ms", "p10", "p90", "GB/s"))
    print(f"{'':30}{columns}" + "".join(f"{title:>12}" for title in COLUMNS.values()))
    rows = []
    for kib in options.kib:
        count = options.mib * 1024 // kib // RUN_BLOCKS * RUN_BLOCKS
        for layout in ("BLNHC", "LBNHC") if choose_sizes(kib * 1024)[1] > 1 else ("BLNHC",):
            with make_target(kib * 1024, 2 * count, layout) as target:
                rows += [measure(target, layout, in_runs, options) for in_runs in (False, True)]
    with make_target(256 * 1024, 64, "BLNHC") as target:
        first = measure_first_block(target, options)
    write_results(options, {"provenance": provenance, "rows": rows, "first_block": first})


if __name__ == "__main__":
    main()
