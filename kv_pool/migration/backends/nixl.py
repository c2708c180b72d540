"""`NixlBackend`: reads of blocks by NIXL over UCX: RDMA between nodes, shared memory within a node."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kv_pool.errors import (
    InvalidArgumentError,
    MigrationError,
    MissingDependencyError,
    OutOfThreadsError,
    PeerUnavailableError,
    TransferFailedError,
    describe_install,
)
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.ids import BlockId, NodeName, TransferId
from kv_pool.loggers import get_logger
from kv_pool.migration.transfer_backend import BlockReader, ReadCount, TransferBackend
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import IntArray, SegmentTable, count_pieces, make_block_ids, split_alike
from kv_pool.threads import start_thread

logger = get_logger(__name__)

_PROGRESS_S = 0.001
_WARM_UP_S = 10.0
_WARM_UP_BYTES = 64
_MAX_INDEX = 2**31 - 1

_SHORTEST_REST_S = 20e-6
_LONGEST_REST_S = 1e-3

_kept: list[tuple[object, ...]] = []
"""Agents with abandoned transfers, and the memory that these may still write; kept until the process ends.

Destroying an agent with a transfer in progress has crashed the peer's process in tests.
"""


class NixlDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The agent's metadata and the memory of the blocks, for readers.

    Attributes:
        rows: base address, stride and span of each row, as in `Segment`.
    """

    metadata: bytes
    memory: str
    device_id: int
    num_blocks: int
    rows: list[tuple[int, int, int]]


class NixlBackend(TransferBackend):
    """A NIXL agent for one storage in host or GPU memory.

    Reads are one-sided: the source does not take part and cannot check whether its blocks are still leased.
    Checksums and generations detect a lost lease (M2, M6). Peers can read the whole storage, padding between
    blocks included.

    An abandoned read is not stopped: the reader's `is_settled` stays False until its bytes have arrived or
    the peer is gone. Each backend uses a new agent name, since NIXL accepts each name only once.

    Raises:
        MissingDependencyError: NIXL is not installed.
        MigrationError: NIXL cannot use this memory.
        OutOfThreadsError: the system cannot start a thread. Nothing stays registered.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, storage: BlockStorage) -> None:
        super().__init__(storage)
        self.nixl: Nixl = load_nixl()
        api = self.nixl.api
        # Without NIXL's own progress thread: it spins, which costs one core for the agent's lifetime, and
        # half of the transfer rate on few cores. Our thread polls every millisecond; reads poll themselves.
        config = api.nixl_agent_config(
            backends=["UCX"],
            enable_prog_thread=False,
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        self._warm_up = np.zeros(_WARM_UP_BYTES, np.uint8)
        try:
            self.agent = api.nixl_agent(f"kv_pool {uuid.uuid4().hex}", config)
            memory, device_id = find_memory(storage)
            regions = [(begin, end - begin, device_id, "") for begin, end in list_regions(storage)]
            self._registered = [
                self.agent.register_memory(regions, memory),
                self.agent.register_memory([(self._warm_up.ctypes.data, _WARM_UP_BYTES, 0, "")], "DRAM"),
            ]
        except self.nixl.errors as error:
            raise MigrationError(
                f"NIXL cannot use the memory of {storage.num_blocks} blocks on {storage.device}: {error}"
            ) from error
        self._readers: list[NixlReader] = []
        self._lock = threading.Lock()
        self._is_closing = threading.Event()
        try:
            self._progress = start_thread("kv_pool nixl", self._make_progress)
        except OutOfThreadsError:
            self._deregister()
            raise

    def describe(self) -> bytes:
        rows = [row[:3] for row in self.storage.segments.to_segments()]
        metadata, num_blocks = self.agent.get_agent_metadata(), self.storage.num_blocks
        return msgspec.msgpack.encode(NixlDescription(metadata, *find_memory(self.storage), num_blocks, rows))

    def open(self, peer_name: NodeName, description: bytes) -> BlockReader:
        try:
            peer = msgspec.msgpack.decode(description, type=NixlDescription)
        except UNDECODABLE as error:
            raise PeerUnavailableError(f"{peer_name} has an invalid NIXL description: {error}") from error
        try:
            agent_name = self.agent.add_remote_agent(peer.metadata).decode()
            reader = NixlReader(self, peer, peer_name, agent_name)
            # Connecting can take seconds, which would otherwise count against the first read's deadline.
            self._connect(peer, agent_name)
        except self.nixl.errors as error:
            raise PeerUnavailableError(f"cannot reach {peer_name} by NIXL: {error}") from error
        with self._lock:
            self._readers = [*(other for other in self._readers if not other.is_done()), reader]
        return reader

    def close(self) -> None:
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._progress.join()
        with self._lock:
            under_way = [reader for reader in self._readers if not reader.is_settled()]
        if under_way:
            logger.warning("%d abandoned NIXL reads may still write; their memory is kept", len(under_way))
            _kept.append((self.agent, self.storage, *under_way))
        else:
            self._deregister()
        self._readers = []
        self.agent = None

    def _deregister(self) -> None:
        for registered in self._registered:
            with suppress(*self.nixl.errors):
                self.agent.deregister_memory(registered)

    def forget(self, agent_name: str) -> None:
        """Remove the agent of a peer that is gone."""
        with suppress(*self.nixl.errors):
            self.agent.remove_remote_agent(agent_name)

    def _make_progress(self) -> None:
        while not self._is_closing.wait(_PROGRESS_S):
            # Serves connections of peers, and their reads on networks without one-sided reads.
            with suppress(*self.nixl.errors):  # errors of one peer, which the affected reads get themselves
                self.agent.get_new_notifs()

    def _connect(self, peer: NixlDescription, agent_name: str) -> None:
        """Connect by reading the first bytes of block 0. Raises PeerUnavailableError or a NIXL error."""
        base, _, span = peer.rows[0]
        count = min(_WARM_UP_BYTES, span)
        here = self.agent.get_xfer_descs([(self._warm_up.ctypes.data, count, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(base, count, peer.device_id)], peer.memory)
        handle = self.agent.initialize_xfer("READ", here, there, agent_name)
        if wait_for(self.agent, handle, time.monotonic() + _WARM_UP_S) == "PROC":
            _kept.append((self.agent, handle, self._warm_up))
            raise PeerUnavailableError(f"agent {agent_name} did not answer within {_WARM_UP_S:.0f} s")
        handle.release()


class NixlReader(BlockReader):
    """A reader made by `NixlBackend.open`.

    Both sides' blocks are split into the same rows; descriptor `row * num_blocks + block` of each side's list
    is one row of one block.
    """

    def __init__(
        self, backend: NixlBackend, peer: NixlDescription, peer_name: NodeName, agent_name: str
    ) -> None:
        self._backend = backend
        self._agent = backend.agent
        self._nixl = backend.nixl
        self._peer_name = peer_name
        self._agent_name = agent_name
        self._there, self._here = split_alike(make_table(peer), backend.storage.segments)
        self._remote = self._prepare(agent_name, self._there, peer.memory, peer.device_id)
        self._local = self._prepare("NIXL_INIT_AGENT", self._here, *find_memory(backend.storage))
        self._under_way: list[Any] = []
        self._is_open = True
        self._is_connected = True

    def read(
        self,
        transfer_id: TransferId,
        remote_ids: Sequence[BlockId],
        local_ids: Sequence[BlockId],
        deadline: float,
    ) -> ReadCount:
        sources = make_block_ids(remote_ids, self._there.num_blocks)
        targets = make_block_ids(local_ids, self._here.num_blocks)
        if not self._is_open:
            raise TransferFailedError(f"the reader of {self._peer_name} was closed")
        if len(sources):
            self._read_blocks(sources, targets, deadline)
        return ReadCount(
            len(sources) * self._there.block_bytes, count_pieces(self._there, self._here, sources, targets)
        )

    def is_settled(self) -> bool:
        self._under_way = [handle for handle in self._under_way if self._look(handle)]
        return not self._under_way

    def is_usable(self) -> bool:
        return self._is_open and self._is_connected

    def close(self) -> None:
        self._is_open = False
        self._free_if_done()

    def is_done(self) -> bool:
        """Return True if the reader is closed and settled, after freeing its resources."""
        return not self._is_open and self._free_if_done()

    def _read_blocks(self, sources: IntArray, targets: IntArray, deadline: float) -> None:
        what = f"reading {len(sources)} blocks of {self._peer_name} by NIXL"
        if time.monotonic() >= deadline:
            raise TransferFailedError(f"{what}: deadline passed before the start")
        handle = None
        try:
            handle = self._agent.make_prepped_xfer(
                "READ",
                self._local,
                list_descriptors(targets, self._here),
                self._remote,
                list_descriptors(sources, self._there),
            )
            state = wait_for(self._agent, handle, deadline)
        except self._nixl.errors as error:
            if isinstance(error, self._nixl.final_errors):
                self._is_connected = False
                self._backend.forget(self._agent_name)
            elif handle is not None:
                self._under_way.append(handle)
            raise TransferFailedError(f"{what}: {error}") from error
        if state == "PROC":
            self._under_way.append(handle)
            raise TransferFailedError(f"{what}: not done in time")
        with suppress(*self._nixl.errors):
            handle.release()
        if state != "DONE":
            raise TransferFailedError(f"{what}: NIXL reports state {state}")

    def _look(self, handle: Any) -> bool:
        """Return True if this transfer may still write; release its handle otherwise."""
        try:
            if self._agent.check_xfer_state(handle) == "PROC":
                return True
        except self._nixl.final_errors:
            pass
        except self._nixl.errors as error:
            logger.warning("cannot check an abandoned NIXL read of %s: %s", self._peer_name, error)
            return True
        with suppress(*self._nixl.errors):
            handle.release()
        return False

    def _free_if_done(self) -> bool:
        if not self.is_settled():
            return False
        for prepared in (self._local, self._remote):
            with suppress(*self._nixl.errors):
                prepared.release()
        return True

    def _prepare(self, agent_name: str, table: SegmentTable, memory: str, device_id: int) -> Any:
        if len(table) * table.num_blocks > _MAX_INDEX:
            raise InvalidArgumentError(
                f"{len(table)} rows of {table.num_blocks} blocks exceed NIXL's limit of {_MAX_INDEX} "
                "descriptors"
            )
        rows = np.array(
            [
                (base, span, device_id, stride, table.num_blocks)
                for base, stride, span, _ in table.to_segments()
            ],
            np.uint64,
        )
        return self._agent.prep_xfer_dlist(agent_name, rows, memory)


def wait_for(agent: Any, handle: Any, deadline: float) -> str:
    """Start a transfer and wait for its end.

    Returns:
        `DONE`, `ERR`, or `PROC` if the deadline has passed. NIXL's errors propagate.

    Within a machine, starting a transfer does most of its work. An unfinished transfer is polled after 20 us,
    then at doubling intervals of up to 1 ms: NIXL has no callbacks, a transfer only progresses when polled,
    and polling without sleep would occupy a core and the GIL.
    """
    state: str = agent.transfer(handle)
    rest = _SHORTEST_REST_S
    while state == "PROC" and time.monotonic() < deadline:
        time.sleep(rest)
        rest = min(2 * rest, _LONGEST_REST_S)
        state = agent.check_xfer_state(handle)
    return state


def list_descriptors(block_ids: IntArray, table: SegmentTable) -> npt.NDArray[np.int32]:
    """Return the descriptor positions of these blocks, row by row, which keeps contiguous memory in order."""
    rows = np.arange(len(table), dtype=np.int32)[:, None] * np.int32(table.num_blocks)
    return (rows + block_ids.astype(np.int32)[None, :]).reshape(-1)


def list_regions(storage: BlockStorage) -> Iterator[tuple[int, int]]:
    """Yield the first address and the end of each contiguous memory region of the storage."""
    table = storage.segments
    ends = table.bases + (table.num_blocks - 1) * table.strides + table.spans
    begin = end = -1
    for base, last in sorted(zip(table.bases.tolist(), ends.tolist(), strict=True)):
        if base > end:
            if end >= 0:
                yield begin, end
            begin, end = base, last
        else:
            end = max(end, last)
    yield begin, end


def find_memory(storage: BlockStorage) -> tuple[str, int]:
    """Return NIXL's name of the memory type, and the GPU's number; 0 for the host."""
    memory = "DRAM" if storage.device == "cpu" else "VRAM"
    return memory, int(storage.device.partition(":")[2] or 0)


def make_table(peer: NixlDescription) -> SegmentTable:
    """Return the segment table of a peer; its addresses are not valid in this process.

    Raises:
        PeerUnavailableError: there are no rows.
    """
    if not peer.rows:
        raise PeerUnavailableError("a peer's memory description has no rows")
    bases, strides, spans = np.ascontiguousarray(np.array(peer.rows, np.int64).T)
    return SegmentTable(peer.num_blocks, bases, strides, spans, (None,) * len(peer.rows))


class Nixl(NamedTuple):
    """The parts of NIXL in use.

    Attributes:
        api: the module `nixl._api`.
        errors: all exception classes of NIXL.
        final_errors: exceptions after which a transfer no longer writes.
    """

    api: Any
    errors: tuple[type[Exception], ...]
    final_errors: tuple[type[Exception], ...]


def load_nixl() -> Nixl:
    """Import NIXL.

    Raises:
        MissingDependencyError: NIXL is not installed or does not work on this machine.
    """
    try:
        from nixl import _api, _bindings
    except ImportError as error:
        raise MissingDependencyError(
            f"NixlBackend needs the packages nixl and nixl-cu12, or nixl-cu13: {error}. "
            f"{describe_install('nixl')}, or without their CUDA dependencies: "
            "pip install --no-deps nixl nixl-cu12"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        # NIXL logs every agent to stdout, which commands use for their output.
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return Nixl(
        _api,
        tuple(
            kind
            for name, kind in vars(_bindings).items()
            if name.startswith("nixl") and isinstance(kind, type) and issubclass(kind, Exception)
        ),
        (_bindings.nixlRemoteDisconnectError, _bindings.nixlBackendError, _bindings.nixlCancelledError),
    )
