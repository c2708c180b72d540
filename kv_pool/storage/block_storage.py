"""`BlockStorage`: the bytes of blocks, on one device; moves them, and does not care what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kv_pool.errors import CopyFailedError, InvalidArgumentError, InvalidBlockError
from kv_pool.storage.copy_cpu import copy_on_cpu
from kv_pool.storage.move_plan import Moves, check_moves, split_rounds
from kv_pool.storage.segments import IntArray, Segment, SegmentTable, split_alike
from kv_pool.storage.tensors import find_device, find_dtype, find_place, find_strides_bytes

CopyBlocks = Callable[[SegmentTable, SegmentTable, IntArray, IntArray], None]
"""Copies block sources[i] of one table to targets[i] of another, both tables on one device and cut alike."""

_BUFFER_BYTES = 64 * 1024 * 1024

_SCRATCH_BYTES = 32 * 1024 * 1024

_FIRST_SCRATCH_ID = 2**32
"""No block has such an id, so that one that is too large by mistake is not taken for a scratch block's."""


class BlockStorage:
    """Blocks 0 to num_blocks - 1 of a segment table.

    `KVStorage` adds K and V of tokens to this. By itself it serves what has no tokens: state of Mamba layers,
    or the layers of several groups that share block ids (`SegmentTable.overlay`).

    Args:
        segments: where the bytes are.
        device: `cpu`, or torch's name of another, such as `cuda:0`.
        block_format: what the bytes of a block mean; blocks are only copied between equal ones.
        copy: how blocks are copied within the device; None for the fastest there is: rows on the CPU, on a
            GPU one Triton launch, or torch where triton is not installed.

    Not safe for two threads that move the same blocks. On a GPU the work is queued on the current stream,
    or moves on one of their own: `use_copy_stream`.
    """

    def __init__(
        self, segments: SegmentTable, device: str, block_format: str, copy: CopyBlocks | None = None
    ) -> None:
        self.segments = segments
        self.device = device
        self.block_format = block_format
        self._copy = find_copy(device) if copy is None else copy
        self._scratch: SegmentTable | None = None
        self._copy_stream: Any = None
        self._engine_streams: tuple[Any, ...] = ()

    @classmethod
    def wrap_state(cls, tensors: Sequence[Any], copy: CopyBlocks | None = None) -> BlockStorage:
        """A storage over tensors that hold something of every block, of any types and shapes.

        Args:
            tensors: arrays or tensors, (num_blocks, ...) each, on one device; what a tensor has of one block
                lies in one piece, and there may be gaps between blocks.
            copy: see the class.
        Raises:
            InvalidArgumentError: none given, unequal counts of blocks, two devices, or scattered state.
        """
        devices = sorted({find_device(tensor) for tensor in tensors})
        counts = sorted({len(tensor) for tensor in tensors})
        if len(devices) != 1 or len(counts) != 1:
            raise InvalidArgumentError(
                f"state is of one number of blocks on one device, not of {counts} on {devices}"
            )
        owners: dict[int, Any] = {}
        segments, formats = [], []
        for tensor in tensors:
            span = tensor.dtype.itemsize
            stride, *inner = find_strides_bytes(tensor)
            for size, step in reversed(list(zip(tensor.shape[1:], inner, strict=True))):
                if size > 1 and step != span:
                    raise InvalidArgumentError(
                        f"the state of one block is in pieces: shape {tuple(tensor.shape)}, strides "
                        f"{(stride, *inner)} bytes"
                    )
                span *= size
            address, owner = find_place(tensor, owners)
            segments.append(Segment(address, stride, span, owner))
            formats.append(f"{find_dtype(tensor)}{list(tensor.shape[1:])}")
        return cls(SegmentTable.from_segments(segments, counts[0]), devices[0], " ".join(formats), copy)

    @property
    def num_blocks(self) -> int:
        return self.segments.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V, without padding."""
        return self.segments.block_bytes

    @property
    def scratch_ids(self) -> range:
        """Ids that `apply_moves` takes besides those of the blocks: scratch blocks, 32 MiB of them or one.

        Their memory belongs to the storage, is allocated at the first use and kept. The null block's slot is
        not used for this, since an engine may rely on its content, such as zeros for padding. A plan with
        cycles overwrites scratch blocks that it does not name.
        """
        num_blocks = min(self.num_blocks, max(1, _SCRATCH_BYTES // self.block_bytes))
        return range(_FIRST_SCRATCH_ID, _FIRST_SCRATCH_ID + num_blocks)

    def use_copy_stream(self, *engine_streams: Any) -> None:
        """Let `apply_moves` queue its copies on a stream of this storage's own, on a GPU.

        Each copy waits for what these streams have queued before, and what they queue later waits for it;
        nobody else waits, neither the host nor other streams. A thread that compacts beside the engine needs
        this: its current stream is not the engine's.

        Args:
            engine_streams: torch's streams that read or write blocks; those that are current for the calling
                thread if none is given.
        Raises:
            InvalidArgumentError: the storage is not on a GPU.
        """
        if self.device == "cpu":
            raise InvalidArgumentError("the storage is in host memory, where copies have no stream")
        import torch

        self._engine_streams = engine_streams or (torch.cuda.current_stream(self.device),)
        self._copy_stream = torch.cuda.Stream(self.device)
        self._scratch = None  # its memory belongs to the stream that it was taken on

    def apply_moves(self, moves: Moves) -> None:
        """Copy whole blocks inside this storage: all layers, K and V.

        Args:
            moves: `BlockMove`s with distinct targets, made at once: each target gets what its source holds
                before the call. Two blocks may so change places, or several in a cycle. Ids may be those of
                `scratch_ids`.
        Raises:
            InvalidTypeError, InvalidBlockError, InvalidArgumentError: no such plan. Nothing was copied.
            CopyFailedError: broke off half-way. Every block that is no target still holds its bytes; the
                targets may hold anything, also those that are sources of other moves. A caller that cannot
                do without these copies them in calls of their own, as `BlockCopying` does. Ids stay as they
                were: nothing has moved.

        On the CPU the copy is done on return. On a GPU it is queued on the current stream (or see
        `use_copy_stream`), and an error of the device shows at the next `synchronize`; reuse a source only by
        work queued behind it, or then.
        Cost: the bytes of the plan, read once and written once; on a GPU one launch for all layers. Cycles
        take a copy more each, and with chains (1 -> 2, 2 -> 3) the longest one's length in launches.
        Contract: invariants C1, C4, C9 and C10 of compaction.
        """
        if self._copy_stream is None:
            self._copy_blocks(self, moves)
            return
        import torch

        for stream in self._engine_streams:
            self._copy_stream.wait_stream(stream)
        try:
            with torch.cuda.stream(self._copy_stream):
                self._copy_blocks(self, moves)
        finally:  # half a copy still writes into its targets, which may be taken next
            for stream in self._engine_streams:
                stream.wait_stream(self._copy_stream)

    def copy_to(self, other: BlockStorage, moves: Moves) -> None:
        """Copy blocks of this storage over blocks of another one in this process, on any device.

        Args:
            other: a storage of the same `block_format`. Its segments may be others, so the layout may
                differ as long as a block's bytes come in the same order.
            moves: `source` is a block here, `target` one of `other`; targets are distinct. Where `other` is
                this storage, as in `apply_moves`.
        Raises:
            InvalidArgumentError: the formats differ.
            Others as in `apply_moves`; after a CopyFailedError the targets in `other` may hold anything.

        Within one device the blocks are copied directly. Between two they pass through a buffer of 64 MiB at
        most on each, and the copy is done on return.
        """
        if self.block_format != other.block_format:
            raise InvalidArgumentError(
                f"blocks here are {self.block_format}, there {other.block_format}: their bytes do not fit"
            )
        for storage in (self, other):  # moves of theirs may still be under way on a stream that is not ours
            storage._wait_for_moves()
        self._copy_blocks(other, moves)

    def _wait_for_moves(self) -> None:
        """What the current stream is given from here on comes behind moves on the storage's own stream."""
        if self._copy_stream is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_stream(self._copy_stream)

    def _copy_blocks(self, other: BlockStorage, moves: Moves) -> None:
        is_same = other is self
        scratch_ids = self.scratch_ids if is_same else range(0)
        sources, targets = check_moves(moves, self.num_blocks, other.num_blocks, is_same, scratch_ids)
        if not len(sources):
            return
        rounds = split_rounds(sources, targets, scratch_ids) if is_same else [(sources, targets)]
        try:
            for round_sources, round_targets in rounds:
                if self.device != other.device:
                    copy_through_buffers(self, other, round_sources, round_targets)
                elif is_same and max(round_sources.max(), round_targets.max()) >= _FIRST_SCRATCH_ID:
                    self._copy_with_scratch(round_sources, round_targets)
                else:
                    self._copy(*split_alike(self.segments, other.segments), round_sources, round_targets)
        except Exception as error:
            raise CopyFailedError(
                f"copying {len(sources)} blocks from {self.device} to {other.device} broke off: {error}. The "
                "sources are intact, unless they are targets; the target blocks may hold anything"
            ) from error

    def _copy_with_scratch(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks within the storage, scratch blocks among them."""
        if self._scratch is None:
            self._scratch = make_scratch(self, len(self.scratch_ids))
        tables = (self.segments, self._scratch)
        from_scratch, to_scratch = sources >= _FIRST_SCRATCH_ID, targets >= _FIRST_SCRATCH_ID
        for is_from, source in enumerate(tables):
            for is_to, target in enumerate(tables):
                chosen = (from_scratch == is_from) & (to_scratch == is_to)
                if chosen.any():
                    self._copy(
                        *split_alike(source, target),
                        sources[chosen] - is_from * _FIRST_SCRATCH_ID,
                        targets[chosen] - is_to * _FIRST_SCRATCH_ID,
                    )

    def read_block(self, block_id: int) -> bytes:
        """The bytes of one block in the order of `block_format`: block_bytes of them. Waits for the device.

        Raises:
            InvalidBlockError: no such block.
        """
        self._check_block(block_id)
        host = make_host_buffer(self.block_bytes, 1, self.block_format)
        self.copy_to(host, [(block_id, 0)])
        array: bytes = host.segments.owners[0].tobytes()
        return array

    def write_block(self, block_id: int, data: bytes | bytearray | memoryview) -> None:
        """Overwrite one block with bytes as `read_block` gives them.

        Raises:
            InvalidBlockError: no such block.
            InvalidArgumentError: not block_bytes of them. In both cases nothing was written.
        """
        self._check_block(block_id)
        array = np.frombuffer(data, np.uint8)
        if array.nbytes != self.block_bytes:
            raise InvalidArgumentError(f"{array.nbytes} bytes for a block of {self.block_bytes}")
        host = make_host_buffer(self.block_bytes, 1, self.block_format)
        host.segments.owners[0][:] = array
        host.copy_to(self, [(0, block_id)])

    def synchronize(self) -> None:
        """Wait until everything queued on the device's current stream is done, and this storage's copies are.

        On the CPU there is nothing to wait for.
        """
        if self.device != "cpu":
            import torch

            if self._copy_stream is not None:
                self._copy_stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise InvalidBlockError(f"block {block_id} is not one of 0 to {self.num_blocks - 1}")


def find_copy(device: str) -> CopyBlocks:
    """The fastest way to copy blocks within a device that is installed here."""
    if device == "cpu":
        return copy_on_cpu
    try:
        from kv_pool.storage.copy_triton import get_triton_copy
    except ImportError:
        from kv_pool.storage.copy_torch import copy_by_torch

        return copy_by_torch
    return get_triton_copy()


def make_host_buffer(block_bytes: int, num_blocks: int, block_format: str) -> BlockStorage:
    """Blocks in host memory, one after another; the owner of the only segment is the array, uint8, flat."""
    array = np.empty(num_blocks * block_bytes, np.uint8)
    row = Segment(array.ctypes.data, block_bytes, block_bytes, array)
    return BlockStorage(SegmentTable.from_segments([row], num_blocks), "cpu", block_format)


def make_device_buffer(
    block_bytes: int, num_blocks: int, block_format: str, device: str, copy: CopyBlocks
) -> BlockStorage:
    """Blocks on a device, one after another; the owner of the only segment is the tensor, uint8, flat."""
    import torch

    tensor = torch.empty(num_blocks * block_bytes, dtype=torch.uint8, device=device)
    row = Segment(tensor.data_ptr(), block_bytes, block_bytes, tensor)
    return BlockStorage(SegmentTable.from_segments([row], num_blocks), device, block_format, copy)


def make_scratch(storage: BlockStorage, num_blocks: int) -> SegmentTable:
    """Further blocks on a storage's device, cut like its own, so that no copy has to cut a table."""
    spans = storage.segments.spans
    sizes = storage.block_bytes, num_blocks, storage.block_format
    if storage.device == "cpu":
        whole = make_host_buffer(*sizes).segments
    else:
        whole = make_device_buffer(*sizes, storage.device, storage._copy).segments
    return SegmentTable(
        num_blocks,
        whole.bases[0] + np.cumsum(spans) - spans,
        np.full_like(spans, storage.block_bytes),
        spans,
        whole.owners * len(spans),
    )


def copy_through_buffers(
    source: BlockStorage,
    target: BlockStorage,
    sources: IntArray,
    targets: IntArray,
    buffer_bytes: int = _BUFFER_BYTES,
) -> None:
    """Copy blocks between devices: gather into a buffer on one, send it, scatter from a buffer on the other.

    Args:
        sources, targets: (num_moves,), int64, valid ids of the two storages.
        buffer_bytes: of each of the two; one block passes through even where it is larger.

    Done on return.
    """
    import torch

    step = min(len(sources), max(1, buffer_bytes // source.block_bytes))
    ends = []
    for storage in (source, target):
        if storage.device == "cpu":
            ends.append(make_host_buffer(source.block_bytes, step, source.block_format))
        else:
            ends.append(
                make_device_buffer(
                    source.block_bytes, step, source.block_format, storage.device, storage._copy
                )
            )
    gathered, scattered = ends
    from_tensor, to_tensor = (torch.as_tensor(end.segments.owners[0]) for end in ends)
    for start in range(0, len(sources), step):
        some = slice(start, start + step)
        places = np.arange(len(sources[some]), dtype=np.int64)
        source._copy(*split_alike(source.segments, gathered.segments), sources[some], places)
        num_bytes = len(places) * source.block_bytes
        to_tensor[:num_bytes].copy_(from_tensor[:num_bytes])
        target._copy(*split_alike(scattered.segments, target.segments), places, targets[some])
    target.synchronize()
