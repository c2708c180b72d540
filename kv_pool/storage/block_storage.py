"""`BlockStorage`: the bytes of blocks on one device, and plans of copies of whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kv_pool.errors import CopyFailedError, InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.ids import BlockId, BlockMove
from kv_pool.storage.copy_cpu import copy_on_cpu
from kv_pool.storage.segments import IntArray, Segment, SegmentTable, make_block_ids, split_alike
from kv_pool.storage.tensors import find_device, find_dtype, find_memory, find_strides_bytes

CopyBlocks = Callable[[SegmentTable, SegmentTable, IntArray, IntArray], None]
"""A function that copies block sources[i] of one table to block targets[i] of another.

Both tables are on one device and cut alike (`split_alike`)."""

Moves = Sequence[BlockMove] | Sequence[tuple[int, int]] | npt.NDArray[np.integer]

_BUFFER_BYTES = 64 * 1024 * 1024

_SCRATCH_BYTES = 32 * 1024 * 1024

_FIRST_SCRATCH_ID = 2**32
"""Far above any block id, so that an id that is too large by mistake is not taken for a scratch block."""


class BlockStorage:
    """A storage of blocks 0 to num_blocks - 1, given by a segment table.

    `KVStorage` adds access to K and V by token. `BlockStorage` alone serves data without tokens: the state of
    Mamba layers, or the layers of several groups that share block ids (`SegmentTable.overlay`).

    Args:
        segments: location of the bytes.
        device: `cpu`, or torch's name of another device, such as `cuda:0`.
        block_format: description of a block's bytes; blocks are copied only between equal formats.
        copy: function that copies blocks within the device. None for the fastest available: rows on the CPU;
            on a GPU one Triton launch, or torch if triton is not installed.

    Not safe for two threads that move the same blocks. On a GPU, work is queued on the current stream; moves
    can use a separate one: `use_copy_stream`.
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
    def wrap_state(
        cls, tensors: Sequence[Any], copy: CopyBlocks | None = None, *, block_format: str | None = None
    ) -> BlockStorage:
        """Return a storage over tensors of any types and shapes whose first axis is the block.

        Args:
            tensors: arrays or tensors, (num_blocks, ...) each, on one device. The part of one block must be
                contiguous in each tensor; there may be gaps between blocks.
            copy: see the class.
            block_format: see the class; None for the types and shapes of the tensors.
        Raises:
            InvalidArgumentError: no tensors, different numbers of blocks, several devices, or a part that is
                not contiguous.
        """
        devices = sorted({find_device(tensor) for tensor in tensors})
        counts = sorted({len(tensor) for tensor in tensors})
        if len(devices) != 1 or len(counts) != 1:
            raise InvalidArgumentError(
                f"tensors need one number of blocks and one device, not {counts} blocks on {devices}"
            )
        owners: dict[int, Any] = {}
        segments, formats = [], []
        for tensor in tensors:
            span = tensor.dtype.itemsize
            stride, *inner = find_strides_bytes(tensor)
            for size, step in reversed(list(zip(tensor.shape[1:], inner, strict=True))):
                if size > 1 and step != span:
                    raise InvalidArgumentError(
                        f"the state of one block is not contiguous: shape {tuple(tensor.shape)}, strides "
                        f"{(stride, *inner)} bytes"
                    )
                span *= size
            address, owner = find_memory(tensor, owners)
            segments.append(Segment(address, stride, span, owner))
            formats.append(f"{find_dtype(tensor)}{list(tensor.shape[1:])}")
        made = " ".join(formats) if block_format is None else block_format
        return cls(SegmentTable.from_segments(segments, counts[0]), devices[0], made, copy)

    @property
    def num_blocks(self) -> int:
        return self.segments.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers, K and V, without padding."""
        return self.segments.block_bytes

    @property
    def scratch_ids(self) -> Sequence[BlockId]:
        """The ids of scratch blocks, which `apply_moves` also accepts: 32 MiB of them, or one block.

        The storage allocates their memory at the first use and keeps it. The null block is not used as
        scratch, because an engine may rely on its content, such as zeros for padding. A plan with cycles
        overwrites scratch blocks that it does not contain.
        """
        num_blocks = min(self.num_blocks, max(1, _SCRATCH_BYTES // self.block_bytes))
        return cast("Sequence[BlockId]", range(_FIRST_SCRATCH_ID, _FIRST_SCRATCH_ID + num_blocks))

    def use_copy_stream(self, *engine_streams: Any) -> None:
        """Make `apply_moves` queue its copies on a separate stream of this storage, on a GPU.

        Each copy waits for all work queued before on the engine streams, and later work on these waits for
        the copy. The host and other streams do not wait. A thread that compacts concurrently with the engine
        needs this, because its current stream is not the engine's.

        Args:
            engine_streams: torch streams that read or write blocks. Default: the current stream of the
                calling thread.
        Raises:
            InvalidArgumentError: the storage is not on a GPU.
        """
        if self.device == "cpu":
            raise InvalidArgumentError("the storage is in host memory, where copies do not use streams")
        import torch

        self._engine_streams = engine_streams or (torch.cuda.current_stream(self.device),)
        self._copy_stream = torch.cuda.Stream(self.device)
        self._scratch = None  # its memory belongs to the stream on which it was allocated

    def apply_moves(self, moves: Moves) -> None:
        """Copy whole blocks inside this storage: all layers, K and V.

        Args:
            moves: `BlockMove`s with distinct targets, applied simultaneously: each target gets the bytes that
                its source holds before the call. Blocks may therefore be swapped, or rotated in a cycle. Ids
                may also be `scratch_ids`.
        Raises:
            InvalidTypeError, InvalidBlockError, InvalidArgumentError: an invalid plan. Nothing was copied.
            CopyFailedError: the copy failed part-way. Blocks that are not targets are intact. The targets,
                even those that are sources of other moves, hold undefined bytes; to protect such sources,
                copy them in separate calls, as `compaction.apply_moves` does. Block ids have not changed.

        On the CPU, the copy is complete on return. On a GPU, it is queued on the current stream (or see
        `use_copy_stream`), and a device error is raised by the next `synchronize`. Overwrite a source only in
        work queued later, or after `synchronize`.
        Cost: one read and one write of the plan's bytes; on a GPU, one launch for all layers. Blocks of a
        cycle are copied twice; chains (1 -> 2, 2 -> 3) take as many launches as the longest one has moves.
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
        finally:  # even a partial copy still writes to its targets, which may be reused next
            for stream in self._engine_streams:
                stream.wait_stream(self._copy_stream)

    def copy_to(self, other: BlockStorage, moves: Moves) -> None:
        """Copy blocks of this storage over blocks of another storage in this process, on any device.

        Args:
            other: a storage of the same `block_format`. Its segments and layout may differ, as long as the
                bytes of a block are in the same order.
            moves: `source` is a block here, `target` a block of `other`; targets are distinct. If `other` is
                this storage, as in `apply_moves`.
        Raises:
            InvalidArgumentError: the formats differ.
            Others as in `apply_moves`; after a CopyFailedError the targets in `other` hold undefined bytes.

        Within one device, blocks are copied directly. Between two devices, they pass through a buffer of at
        most 64 MiB on each, and the copy is complete on return.
        """
        if self.block_format != other.block_format:
            raise InvalidArgumentError(
                f"the block formats differ: {self.block_format} here, {other.block_format} there"
            )
        for storage in (self, other):  # their moves may still be running on another stream
            storage._wait_for_moves()
        self._copy_blocks(other, moves)

    def _wait_for_moves(self) -> None:
        """Make the current stream wait for moves on this storage's copy stream."""
        if self._copy_stream is not None:
            import torch

            torch.cuda.current_stream(self.device).wait_stream(self._copy_stream)

    def _copy_blocks(self, other: BlockStorage, moves: Moves) -> None:
        is_same = other is self
        scratch_ids = cast(range, self.scratch_ids) if is_same else range(0)
        sources, targets = parse_moves(moves, self.num_blocks, other.num_blocks, is_same, scratch_ids)
        if not len(sources):
            return
        rounds = split_rounds(sources, targets, self.scratch_ids) if is_same else [(sources, targets)]
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
                f"copying {len(sources)} blocks from {self.device} to {other.device} failed: {error}. "
                "Sources that are not targets are intact; the target blocks hold undefined bytes"
            ) from error

    def _copy_with_scratch(self, sources: IntArray, targets: IntArray) -> None:
        """Copy blocks within the storage, including scratch blocks."""
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

    def read_block(self, block_id: BlockId) -> bytes:
        """Return the `block_bytes` bytes of one block in the order of `block_format`. Waits for the device.

        Raises:
            InvalidBlockError: the id is out of range.
        """
        make_block_ids([block_id], self.num_blocks)
        host = make_host_buffer(self.block_bytes, 1, self.block_format)
        self.copy_to(host, [(block_id, 0)])
        array: bytes = host.segments.owners[0].tobytes()
        return array

    def write_block(self, block_id: BlockId, data: bytes | bytearray | memoryview) -> None:
        """Overwrite one block with bytes in the format of `read_block`.

        Raises:
            InvalidBlockError: the id is out of range.
            InvalidArgumentError: `data` does not have `block_bytes` bytes. In both cases nothing was written.
        """
        make_block_ids([block_id], self.num_blocks)
        array = np.frombuffer(data, np.uint8)
        if array.nbytes != self.block_bytes:
            raise InvalidArgumentError(f"data has {array.nbytes} bytes; a block has {self.block_bytes}")
        host = make_host_buffer(self.block_bytes, 1, self.block_format)
        host.segments.owners[0][0] = array
        host.copy_to(self, [(0, block_id)])

    def synchronize(self) -> None:
        """Wait for the device's current stream and for this storage's copies. No-op on the CPU."""
        if self.device != "cpu":
            import torch

            if self._copy_stream is not None:
                self._copy_stream.synchronize()
            torch.cuda.current_stream(self.device).synchronize()


# ---- plans -------------------------------------------------------------------------------------------


def parse_moves(
    moves: Moves, num_sources: int, num_targets: int, same_blocks: bool, scratch_ids: range = range(0)
) -> tuple[IntArray, IntArray]:
    """Check a plan, and return its source and target ids, each (num_moves,), int64, in the plan's order.

    Args:
        moves: `BlockMove`s or pairs, or a (num_moves, 2) integer array of them.
        num_sources, num_targets: number of blocks of the two storages.
        same_blocks: both are the same storage, so a move from a block to itself is an error.
        scratch_ids: additional valid ids, for sources and targets.
    Raises:
        InvalidTypeError: `moves` are not pairs of integers.
        InvalidBlockError: an id is out of range.
        InvalidArgumentError: two moves have the same target, or a block is moved to itself.

    Callers check before they copy anything. Cost: O(n log n).
    """
    plan = _read_pairs(moves)
    sources = np.ascontiguousarray(plan[:, 0], np.int64)
    targets = np.ascontiguousarray(plan[:, 1], np.int64)
    for name, ids, num_blocks in (("source", sources, num_sources), ("target", targets, num_targets)):
        outside = ((ids < 0) | (ids >= num_blocks)) & ((ids < scratch_ids.start) | (ids >= scratch_ids.stop))
        if outside.any():
            first = int(np.argmax(outside))
            raise InvalidBlockError(
                f"move {first} has block {ids[first]} as its {name}; block ids are 0 to {num_blocks - 1}. "
                "Nothing was copied"
            )
    by_id = np.sort(targets)
    twice = by_id[1:][by_id[1:] == by_id[:-1]]
    if len(twice):
        raise InvalidArgumentError(f"block {twice[0]} is the target of two moves. Nothing was copied")
    if same_blocks and (sources == targets).any():
        itself = sources[sources == targets]
        raise InvalidArgumentError(f"block {itself[0]} is moved to itself. Nothing was copied")
    return sources, targets


def split_rounds(
    sources: IntArray, targets: IntArray, scratch_ids: Sequence[BlockId]
) -> list[tuple[IntArray, IntArray]]:
    """Split a plan within one storage into rounds that, run in order, equal applying all moves at once.

        plan      1 -> 2   2 -> 1   5 -> 6   6 -> 7                            s, t  scratch blocks
        rounds    6 -> 7   then   5 -> 6   then   1 -> s   2 -> t   then   s -> 2   t -> 1

    Within a round, no block is the target of one move and part of another, so its moves run in any order.

    Args:
        sources, targets: as returned by `parse_moves`.
        scratch_ids: scratch blocks, for the content of cycles. With more blocks in cycles than scratch
            blocks, they are reused.
    Raises:
        InvalidArgumentError: the plan has a cycle, and uses all scratch blocks itself.
    Cost: O(n log n) in NumPy for each round.
    """
    if not np.isin(sources, targets).any():
        return [(sources, targets)]
    free_ids = np.setdiff1d(np.asarray(scratch_ids, np.int64), np.concatenate([sources, targets]))
    rounds: list[tuple[IntArray, IntArray]] = []
    while len(targets):
        is_read = np.isin(targets, sources)
        if not is_read.all():
            rounds.append((sources[~is_read], targets[~is_read]))
            sources, targets = sources[is_read], targets[is_read]
            continue
        # Only cycles are left, which read each block once. Save blocks before they are overwritten.
        if not len(free_ids):
            raise InvalidArgumentError(
                f"block {targets[0]} is part of a cycle of moves, and no scratch block is left. "
                "Nothing was copied"
            )
        saved, scratch = sources[: len(free_ids)], free_ids[: len(sources)]
        rounds.append((saved, scratch))
        sources = np.concatenate([scratch, sources[len(saved) :]])
    return rounds


def _read_pairs(moves: Moves) -> npt.NDArray[np.integer]:
    """Return the plan as (num_moves, 2) integers. Raise InvalidTypeError for other types."""
    if isinstance(moves, np.ndarray):
        plan = moves
    else:
        # Flatten first: NumPy converts a flat list of numbers five times faster than a list of pairs.
        try:
            lengths = set(map(len, moves))
            flat = np.array(list(chain.from_iterable(moves)) or np.empty(0, np.int64))
        except (TypeError, ValueError) as error:
            raise InvalidTypeError(f"a plan is a list of BlockMove(source, target): {error}") from error
        if lengths - {2}:
            raise InvalidTypeError(
                f"a move has a source and a target; some moves have {sorted(lengths - {2})} elements"
            )
        plan = flat.reshape(-1, 2)
    if plan.ndim != 2 or plan.shape[1] != 2 or plan.dtype.kind not in "iu":
        raise InvalidTypeError(
            f"a plan is a list of BlockMove(source, target); got shape {plan.shape} of {plan.dtype}"
        )
    return plan


# ---- memory, and ways to copy ------------------------------------------------------------------------


def find_copy(device: str) -> CopyBlocks:
    """Return the fastest installed function that copies blocks within a device."""
    if device == "cpu":
        return copy_on_cpu
    try:
        from kv_pool.storage.copy_triton import copy_by_triton
    except ImportError:
        from kv_pool.storage.copy_torch import copy_by_torch

        return copy_by_torch
    return copy_by_triton


def make_host_buffer(block_bytes: int, num_blocks: int, block_format: str) -> BlockStorage:
    """Return a storage of adjacent blocks in host memory.

    Its only segment's owner is an array, (num_blocks, block_bytes) uint8.
    """
    memory = np.empty((num_blocks, block_bytes), np.uint8)
    return BlockStorage.wrap_state([memory], block_format=block_format)


def make_buffer_beside(storage: BlockStorage, num_blocks: int, *, is_on_host: bool = False) -> BlockStorage:
    """Return a storage of adjacent blocks like those of another storage, on its device.

    Its only segment's owner is (num_blocks, block_bytes) uint8, an array, or a tensor beside a GPU.

    Args:
        is_on_host: beside a GPU, allocate pinned memory of the host.
    """
    if storage.device == "cpu":
        return make_host_buffer(storage.block_bytes, num_blocks, storage.block_format)
    import torch

    place: Any = {"pin_memory": True} if is_on_host else {"device": storage.device}
    memory = torch.empty((num_blocks, storage.block_bytes), dtype=torch.uint8, **place)
    copy = None if is_on_host else storage._copy
    return BlockStorage.wrap_state([memory], copy, block_format=storage.block_format)


def make_scratch(storage: BlockStorage, num_blocks: int) -> SegmentTable:
    """Return new blocks on a storage's device, with the same cuts, so that copies need not split tables."""
    spans = storage.segments.spans
    whole = make_buffer_beside(storage, num_blocks).segments
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
        buffer_bytes: size of each buffer; at least one block fits even if it is larger.

    The copy is complete on return.
    """
    import torch

    step = min(len(sources), max(1, buffer_bytes // source.block_bytes))
    gathered, scattered = (make_buffer_beside(storage, step) for storage in (source, target))
    from_tensor, to_tensor = (torch.as_tensor(end.segments.owners[0]) for end in (gathered, scattered))
    for start in range(0, len(sources), step):
        some = slice(start, start + step)
        places = np.arange(len(sources[some]), dtype=np.int64)
        source._copy(*split_alike(source.segments, gathered.segments), sources[some], places)
        to_tensor[: len(places)].copy_(from_tensor[: len(places)])
        target._copy(*split_alike(scattered.segments, target.segments), places, targets[some])
    target.synchronize()
