"""`NixlBackend`: blocks by NIXL over UCX: RDMA between nodes, memory to memory within one."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from kv_pool.errors import (
    InvalidArgumentError,
    MigrationError,
    OutOfThreadsError,
    PeerUnavailableError,
    TransferFailedError,
)
from kv_pool.foreign_bytes import UNDECODABLE
from kv_pool.migration.backends.nixl_module import Nixl, load_nixl
from kv_pool.migration.transfer_backend import BlockReader, ReadCount, TransferBackend
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.storage.segments import IntArray, SegmentTable, split_alike
from kv_pool.storage.spans import count_pieces, make_block_ids
from kv_pool.threads import start_thread

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.001
_WARM_UP_S = 10.0
_WARM_UP_BYTES = 64
_MAX_INDEX = 2**31 - 1

_SHORTEST_REST_S = 20e-6
_LONGEST_REST_S = 1e-3

_kept: list[tuple[object, ...]] = []
"""Agents with transfers that nobody waits for any more, and the memory that these may still write; until the
process ends. An agent destroyed with a transfer under way has been seen to take its peer's process along."""


class NixlDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reader needs: the agent's metadata, and where the blocks are; columns as in `SegmentTable`."""

    metadata: bytes
    memory: str
    device_id: int
    num_blocks: int
    bases: list[int]
    strides: list[int]
    spans: list[int]


class NixlBackend(TransferBackend):
    """One NIXL agent for one storage, of host memory or a GPU's.

    The reader gets the bytes by itself; the source only connects. So the source does not check whether blocks
    are still lent: checksums and generations find out (M2, M6). The agent lets its peers read all of the
    storage, padding between blocks included.

    Giving up a read does not stop its bytes: such a reader says so (`is_settled`) until they have come, or
    the peer has gone. Each backend has a new agent name, since NIXL takes none twice.

    Raises:
        MissingDependencyError: NIXL is not installed.
        MigrationError: it can not use this memory.
        OutOfThreadsError: the system starts no more threads. Nothing stays registered.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, storage: BlockStorage) -> None:
        super().__init__(storage)
        self.nixl: Nixl = load_nixl()
        api = self.nixl.api
        # Without NIXL's own progress thread: it spins, which takes a core for as long as the agent lives, and
        # half of the rate where cores are few. A thread of ours looks once a millisecond; reads look
        # by themselves.
        config = api.nixl_agent_config(
            backends=["UCX"],
            enable_prog_thread=False,
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW,
        )
        self._warm_up = np.zeros(_WARM_UP_BYTES, np.uint8)
        try:
            self.agent = api.nixl_agent(f"kv_pool {uuid.uuid4().hex}", config)
            regions = [
                (begin, end - begin, find_device_id(storage), "") for begin, end in list_regions(storage)
            ]
            self._registered = [
                self.agent.register_memory(regions, find_memory(storage)),
                self.agent.register_memory([(self._warm_up.ctypes.data, _WARM_UP_BYTES, 0, "")], "DRAM"),
            ]
        except self.nixl.errors as error:
            raise MigrationError(
                f"NIXL can not use {storage.num_blocks} blocks on {storage.device}: {error}"
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
        table = self.storage.segments
        return msgspec.msgpack.encode(
            NixlDescription(
                self.agent.get_agent_metadata(),
                find_memory(self.storage),
                find_device_id(self.storage),
                table.num_blocks,
                table.bases.tolist(),
                table.strides.tolist(),
                table.spans.tolist(),
            )
        )

    def open(self, peer_name: str, description: bytes) -> BlockReader:
        try:
            peer = msgspec.msgpack.decode(description, type=NixlDescription)
        except UNDECODABLE as error:
            raise PeerUnavailableError(f"{peer_name} does not say how to read from it: {error}") from error
        try:
            agent_name = self.agent.add_remote_agent(peer.metadata).decode()
            reader = NixlReader(self, peer, peer_name, agent_name)
            # Connecting takes up to seconds, and would otherwise be the first read's time.
            self._connect(peer, agent_name)
        except self.nixl.errors as error:
            raise PeerUnavailableError(f"{peer_name} can not be reached by NIXL: {error}") from error
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
            logger.warning(
                "%d reads by NIXL were given up and may still write: their memory stays", len(under_way)
            )
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
        """The peer of this agent has gone."""
        with suppress(*self.nixl.errors):
            self.agent.remove_remote_agent(agent_name)

    def _make_progress(self) -> None:
        while not self._is_closing.wait(_PROGRESS_S):
            # For what comes from peers: connections, and bytes where the network needs help to read memory.
            with suppress(*self.nixl.errors):  # of one peer; the reads that it was for hear of it themselves
                self.agent.get_new_notifs()

    def _connect(self, peer: NixlDescription, agent_name: str) -> None:
        """Read the first bytes of block 0. Raises PeerUnavailableError or one of NIXL's errors."""
        count = min(_WARM_UP_BYTES, peer.spans[0])
        here = self.agent.get_xfer_descs([(self._warm_up.ctypes.data, count, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(peer.bases[0], count, peer.device_id)], peer.memory)
        handle = self.agent.initialize_xfer("READ", here, there, agent_name)
        if wait_for(self.agent, handle, time.monotonic() + _WARM_UP_S) == "PROC":
            _kept.append((self.agent, handle, self._warm_up))
            raise PeerUnavailableError(f"agent {agent_name} has not answered in {_WARM_UP_S:.0f} s")
        handle.release()


class NixlReader(BlockReader):
    """Made by `NixlBackend.open`.

    Descriptor `row * num_blocks + block` of each side's list is one row of one block, both sides cut alike.
    """

    def __init__(self, backend: NixlBackend, peer: NixlDescription, peer_name: str, agent_name: str) -> None:
        self._backend = backend
        self._agent = backend.agent
        self._errors = backend.nixl.errors
        self._final_errors = backend.nixl.final_errors
        self._peer_name = peer_name
        self._agent_name = agent_name
        self._there, self._here = split_alike(make_table(peer), backend.storage.segments)
        storage = backend.storage
        self._remote = self._prepare(agent_name, self._there, peer.memory, peer.device_id)
        self._local = self._prepare(
            "NIXL_INIT_AGENT", self._here, find_memory(storage), find_device_id(storage)
        )
        self._under_way: list[Any] = []
        self._is_open = True
        self._is_connected = True

    def read(
        self, transfer_id: bytes, remote_ids: Sequence[int], local_ids: Sequence[int], deadline: float
    ) -> ReadCount:
        sources = make_block_ids(remote_ids, self._there.num_blocks)
        targets = make_block_ids(local_ids, self._here.num_blocks)
        if not self._is_open:
            raise TransferFailedError(f"the reader of {self._peer_name} was closed", self.is_settled())
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
        """Is it closed, and nothing written by it any more? Then it holds nothing."""
        return not self._is_open and self._free_if_done()

    def _read_blocks(self, sources: IntArray, targets: IntArray, deadline: float) -> None:
        what = f"reading {len(sources)} blocks of {self._peer_name} by NIXL"
        if time.monotonic() >= deadline:
            raise TransferFailedError(f"{what}: time was over before it began", self.is_settled())
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
        except self._errors as error:
            if isinstance(error, self._final_errors):
                self._is_connected = False
                self._backend.forget(self._agent_name)
            elif handle is not None:
                self._under_way.append(handle)
            raise TransferFailedError(f"{what}: {error}", self.is_settled()) from error
        if state == "PROC":
            self._under_way.append(handle)
            raise TransferFailedError(f"{what}: not done in time", is_settled=False)
        with suppress(*self._errors):
            handle.release()
        if state != "DONE":
            raise TransferFailedError(f"{what}: NIXL says {state}")

    def _look(self, handle: Any) -> bool:
        """May this transfer still write? One that may not is given back."""
        try:
            if self._agent.check_xfer_state(handle) == "PROC":
                return True
        except self._final_errors:
            pass
        except self._errors as error:
            logger.warning("a read of %s was given up, and NIXL does not know it: %s", self._peer_name, error)
            return True
        with suppress(*self._errors):
            handle.release()
        return False

    def _free_if_done(self) -> bool:
        if not self.is_settled():
            return False
        for prepared in (self._local, self._remote):
            with suppress(*self._errors):
                prepared.release()
        return True

    def _prepare(self, agent_name: str, table: SegmentTable, memory: str, device_id: int) -> Any:
        if len(table) * table.num_blocks > _MAX_INDEX:
            raise InvalidArgumentError(
                f"{len(table)} rows of {table.num_blocks} blocks are more descriptors than NIXL can count"
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
    """Start a transfer and wait for it.

    Returns:
        `DONE`, `ERR`, or `PROC` when the deadline has passed. NIXL's errors come through.

    Within a machine most of one is done while it is started. What is not is looked at again after 20 us, then
    after twice as long each time, up to 1 ms: NIXL calls nobody back, a look is what moves a transfer on, and
    looking without a rest would take a core, and Python's lock, from everybody else.
    """
    state: str = agent.transfer(handle)
    rest = _SHORTEST_REST_S
    while state == "PROC" and time.monotonic() < deadline:
        time.sleep(rest)
        rest = min(2 * rest, _LONGEST_REST_S)
        state = agent.check_xfer_state(handle)
    return state


def list_descriptors(block_ids: IntArray, table: SegmentTable) -> npt.NDArray[np.int32]:
    """Positions in the list of a table's descriptors: row by row, so that neighbours in memory follow."""
    rows = np.arange(len(table), dtype=np.int32)[:, None] * np.int32(table.num_blocks)
    return (rows + block_ids.astype(np.int32)[None, :]).reshape(-1)


def list_regions(storage: BlockStorage) -> Iterator[tuple[int, int]]:
    """First address and end of each stretch of memory that rows of the storage lie in."""
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


def find_memory(storage: BlockStorage) -> str:
    """NIXL's word for the kind of memory."""
    return "DRAM" if storage.device == "cpu" else "VRAM"


def find_device_id(storage: BlockStorage) -> int:
    """The number of the GPU; 0 for the host."""
    return int(storage.device.partition(":")[2] or 0)


def make_table(peer: NixlDescription) -> SegmentTable:
    """The segment table of a peer; its addresses mean nothing here.

    Raises:
        PeerUnavailableError: the columns do not make one.
    """
    if not peer.spans or not len(peer.bases) == len(peer.strides) == len(peer.spans):
        raise PeerUnavailableError("a peer describes its memory by columns of unequal length, or none")
    return SegmentTable(
        peer.num_blocks,
        np.array(peer.bases, np.int64),
        np.array(peer.strides, np.int64),
        np.array(peer.spans, np.int64),
        (None,) * len(peer.spans),
    )
