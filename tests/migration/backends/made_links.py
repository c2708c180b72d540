"""A target that reads from a source, over each backend; storages of one format in many layouts."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

from kv_pool.errors import StaleTransferError
from kv_pool.migration.backends.in_process import InProcessBackend
from kv_pool.migration.backends.nixl import NixlBackend
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.bulk_listener import BulkListener
from kv_pool.migration.messages import DescribeNode
from kv_pool.migration.remote_calls import CallServer, RemoteCalls
from kv_pool.migration.transfer_backend import BulkBackend
from kv_pool.storage import BlockStorage, KVStorage, Segment, SegmentTable

SECRET = b"sixteen bytes or more"
TRANSFER_ID = b"t" * 16
BACKENDS = {"in_process": InProcessBackend, "tcp": TcpBackend, "nixl": NixlBackend}
ALL_BACKENDS = ["in_process", "tcp", pytest.param("nixl", marks=pytest.mark.nixl)]
SERVING_BACKENDS = ["in_process", "tcp"]
REMOTE_BACKENDS = ["tcp", pytest.param("nixl", marks=pytest.mark.nixl)]

BLOCK_SIZE, LAYERS, HEADS, HEAD_SIZE = 4, 3, 2, 8


def make_kv(layout, num_blocks, device="cpu"):
    return KVStorage.allocate(num_blocks, BLOCK_SIZE, LAYERS, HEADS, HEAD_SIZE, "float16", device, layout)


def make_rows(num_blocks, spans, padding, block_format):
    """Make a storage with one array per row, with foreign bytes between its blocks."""
    rows = []
    for span in spans:
        stride = span + padding
        memory = np.zeros(num_blocks * stride, np.uint8)
        rows.append(Segment(memory.ctypes.data, stride, span, memory))
    return BlockStorage(SegmentTable.from_segments(rows, num_blocks), "cpu", block_format)


LAYOUT_PAIRS = {
    "layers to layers": lambda n, m: (make_kv("NHD", n), make_kv("NHD", m)),
    "layers to whole blocks": lambda n, m: (make_kv("NHD", n), make_kv("BLNHC", m)),
    "whole blocks to layers": lambda n, m: (make_kv("BLNHC", n), make_kv("NHD", m)),
    "whole blocks to whole blocks": lambda n, m: (make_kv("BLHNC", n), make_kv("BLHNC", m)),
    "heads outermost": lambda n, m: (make_kv("LHBNC", n), make_kv("LHBNC", m)),
    "K and V apart": lambda n, m: (make_kv("SGLANG", n), make_kv("FLASH", m)),
    "padded, cut elsewhere": lambda n, m: (
        make_rows(n, [96, 32, 160], 64, "x"),
        make_rows(m, [64, 224], 0, "x"),
    ),
    "rows of 16 KiB, cut elsewhere": lambda n, m: (
        make_rows(n, [32768, 16384], 0, "y"),
        make_rows(m, [16384, 32768], 256, "y"),
    ),
    "pieces of few blocks": lambda n, m: (
        make_rows(n, [3 << 20], 0, "z"),
        make_rows(m, [1 << 20, 2 << 20], 0, "z"),
    ),
}
"""Name -> a function that makes a source of n blocks and a target of m."""


def get_memories(storage):
    """Return all memory of a storage, padding included, as flat byte arrays."""
    owners = {id(owner): owner for owner in storage.segments.owners}
    return [np.asarray(owner).reshape(-1).view(np.uint8) for owner in owners.values()]


def fill(storage, seed):
    rng = np.random.default_rng(seed)
    for memory in get_memories(storage):
        memory[:] = rng.integers(0, 256, len(memory), np.uint8)


def read_all(storage):
    return [storage.read_block(block_id) for block_id in range(storage.num_blocks)]


@dataclass
class Link:
    """A source and a target with their backends, attached as by their nodes."""

    source: BlockStorage
    target: BlockStorage
    source_backend: object
    target_backend: object
    asked: list = field(default_factory=list)
    readers: list = field(default_factory=list)
    check_leased: Callable = lambda transfer_id, block_ids: None

    def open(self):
        """Return a reader that is closed with the link."""
        reader = self.target_backend.open("source", self.source_backend.describe())
        self.readers.append(reader)
        return reader

    def close(self):
        for reader in self.readers:
            reader.close()
        self.target_backend.close()
        self.source_backend.close()

    def _check_leased(self, transfer_id, block_ids):
        self.asked.append((transfer_id, list(block_ids)))
        self.check_leased(transfer_id, block_ids)


@pytest.fixture
def make_link():
    """Connect two storages; close everything after the test."""
    with ExitStack() as stack:

        def make(kind, source, target):
            link = Link(source, target, BACKENDS[kind](source), BACKENDS[kind](target))
            server = stack.enter_context(serve_bulk(link.source_backend))
            link.source_backend.attach(link._check_leased, refuse)
            link.target_backend.attach(refuse, make_connect(lambda: server.address))
            stack.callback(link.close)
            return link

        yield make


def serve_bulk(*backends):
    """Return the server of a node with these backends, which only sends blocks."""
    senders = {one.name: one.make_sender for one in backends if isinstance(one, BulkBackend)}
    return CallServer("127.0.0.1:0", SECRET, lambda *_: DescribeNode(), bulk=BulkListener(senders))


def make_connect(find_address, secret=SECRET):
    """Return the `connect_bulk` of a node whose one peer has this address."""

    def connect_bulk(name, message, timeout_s):
        return RemoteCalls(find_address(), secret, "target").connect_bulk(message, timeout_s)

    return connect_bulk


def refuse(transfer_id, block_ids):
    raise StaleTransferError("the target leases nothing")
