"""Storages over real memory in engines' layouts, with the positions of each block's bytes in that memory.

The positions come from indexing an array of addresses as an engine indexes its tensors. They do not come from
the storage, so its copies can be checked against them.
"""

from math import prod

import numpy as np

from kv_pool.storage import BlockStorage, KVStorage
from kv_pool.storage.copy_cpu import copy_on_cpu

NUM_LAYERS, NUM_HEADS, HEAD_SIZE = 2, 3, 5


class BreakingCopy:
    """Copies blocks on the CPU; fails after `num_good` moves of a plan, unless that is None."""

    num_good = None

    def __call__(self, source, target, sources, targets):
        copy_on_cpu(source, target, sources[: self.num_good], targets[: self.num_good])
        if self.num_good is not None:
            raise OSError("the device fell off the bus")


class OwnedMemory:
    """An allocation, a storage over it, and the positions of each block's bytes in it.

    Attributes:
        bytes: all of the memory, (num_bytes,), uint8; noise at first.
        places: (num_blocks, block_bytes), positions in `bytes`.
        padding: positions that belong to no block.
    """

    def __init__(self, rng, num_blocks, shapes, make_storage):
        """
        Args:
            shapes: for each tensor: (shape, part that the storage gets, dtype, axis of the blocks).
            make_storage: from the list of tensors.
        """
        sizes = [prod(shape) * np.dtype(dtype).itemsize for shape, _, dtype, _ in shapes]
        self.bytes = rng.integers(0, 256, sum(sizes), np.uint8)
        tensors, places = [], []
        start = 0
        for size, (shape, given, dtype, axis) in zip(sizes, shapes, strict=True):
            end = start + size
            tensors.append(self.bytes[start:end].view(dtype).reshape(shape)[given])
            addresses = np.arange(start, end).reshape(*shape, np.dtype(dtype).itemsize)[given]
            places.append(np.moveaxis(addresses, axis, 0).reshape(num_blocks, -1))
            start = end
        self.places = np.concatenate(places, axis=1)
        self.padding = np.setdiff1d(np.arange(start), self.places)
        self.storage = make_storage(tensors)
        assert self.storage.num_blocks == num_blocks
        assert self.storage.block_bytes == self.places.shape[1]

    def read_all(self):
        """Return a copy of each block's bytes."""
        return [row.tobytes() for row in self.bytes[self.places]]

    def write(self, block_id, content):
        self.bytes[self.places[block_id]] = np.frombuffer(content, np.uint8)


ALL = slice(None)
L, H, D, C = NUM_LAYERS, NUM_HEADS, HEAD_SIZE, 2 * HEAD_SIZE


def kv(layout, make_shape, *, given=ALL, num_tensors=1, axis=0, dtype="float16", **options):
    """A recipe for a `KVStorage` in a layout.

    Args:
        make_shape: of each tensor, from the number of blocks.
        given: the part of each tensor that the storage gets; the rest is padding.
        axis: the axis of the blocks.
    """

    def make(rng, num_blocks, copy):
        shapes = [(make_shape(num_blocks), given, dtype, axis)] * num_tensors
        return OwnedMemory(
            rng, num_blocks, shapes, lambda tensors: KVStorage.wrap(tensors, layout, copy=copy, **options)
        )

    return make


def make_state(rng, num_blocks, copy):
    """Two states of different types, by block id and without tokens; there are gaps in the first."""
    shapes = [
        ((num_blocks, 4, 7), (ALL, slice(3)), "int16", 0),
        ((num_blocks, 2, 9), ALL, "float32", 0),
    ]
    return OwnedMemory(rng, num_blocks, shapes, lambda tensors: BlockStorage.wrap_state(tensors, copy=copy))


MEMORIES = {
    "NHD": kv("NHD", lambda blocks: (blocks, 4, H, C), num_tensors=L),
    "HND padded": kv("HND", lambda blocks: (blocks, H + 1, 4, C), given=(ALL, slice(H)), num_tensors=L),
    "odd blocks": kv("NHD", lambda blocks: (blocks, 8, H, C), given=(ALL, slice(5)), num_tensors=L),
    "heads outermost": kv("LHBNC", lambda blocks: (H, blocks, 4, C), num_tensors=L, axis=1),
    "block outermost": kv("BLNHC", lambda blocks: (blocks, L + 1, 4, H, C), given=(ALL, slice(L))),
    "FlashAttention": kv("FLASH", lambda blocks: (2, blocks, 4, H, D), num_tensors=L, axis=1),
    "SGLang": kv("SGLANG", lambda blocks: (blocks * 4, H, D), num_tensors=2 * L, block_size=4),
    "latent": kv("MLA", lambda blocks: (blocks, 7, 9), given=(ALL, slice(4)), num_tensors=L, dtype="uint8"),
    "state": make_state,
}
"""By name, how to make memory from a generator, the number of blocks and a way to copy."""
