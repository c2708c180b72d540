"""Shared parts of the storage tests: ways to copy, layouts, and a model that copies by plain indexing."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kv_pool.storage import KVStorage
from kv_pool.storage.copy_cpu import copy_on_cpu

# The block axis of each layout. In `2L|THD`, a block is block_size steps of it.
BLOCK_AXES = {
    "L|BNHC": 0,
    "L|BHNC": 0,
    "L|HBNC": 1,
    "|BLHNC": 0,
    "|BLNHC": 0,
    "|BHLNC": 0,
    "L|2BNHD": 1,
    "L|B2NHD": 0,
    "L|B2HND": 0,
    "2L|THD": 0,
    "|BL2F": 0,
    "L|BND": 0,
}

WAYS_TO_COPY = [
    "cpu",
    pytest.param("torch", marks=pytest.mark.torch),
    pytest.param("triton", marks=pytest.mark.triton),
    pytest.param("gpu-torch", marks=pytest.mark.gpu),
    pytest.param("gpu-triton", marks=pytest.mark.gpu),
]


@dataclass
class WayToCopy:
    """An implementation of the copy contract, and the memory that it works on."""

    name: str
    copy: Any
    library: str
    device: str

    def make_tensor(self, array):
        """Return a new tensor with the content and strides of an array."""
        whole = array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        if self.library == "numpy":
            made = whole.copy()
            start = (array.ctypes.data - whole.ctypes.data) // whole.itemsize
            return np.ndarray(array.shape, array.dtype, made, start * whole.itemsize, array.strides)
        import torch

        made = torch.from_numpy(whole.copy().reshape(-1)).to(self.device)
        start = (array.ctypes.data - whole.ctypes.data) // array.itemsize
        return made.view(-1).as_strided(
            array.shape, [step // array.itemsize for step in array.strides], start
        )


def make_way(name, monkeypatch):
    if name == "cpu":
        return WayToCopy(name, copy_on_cpu, "numpy", "cpu")
    device = "cuda:0" if name.startswith("gpu") else "cpu"
    if name.endswith("torch"):
        from kv_pool.storage.copy_torch import copy_by_torch

        return WayToCopy(name, copy_by_torch, "torch", device)
    from kv_pool.storage import copy_triton

    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(copy_triton, "make_kernel", copy_triton.make_kernel.__wrapped__)
    return WayToCopy(name, copy_triton.copy_by_triton, "torch", device)


def to_numpy(tensor):
    """Return a copy of a tensor or array; elements of types unknown to NumPy become integers."""
    if isinstance(tensor, np.ndarray):
        return tensor.copy()
    import torch

    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.cpu().contiguous().view(widths[tensor.element_size()]).numpy().copy()


def allocate(way, layout, num_blocks=7, block_size=4, num_layers=2, heads=3, head_size=8, dtype="float16"):
    """Return a storage filled with random bytes."""
    storage = KVStorage.allocate(
        num_blocks,
        block_size,
        num_layers,
        heads if "H" in layout or "C" in layout or "F" in layout else 1,
        head_size,
        dtype,
        way.device,
        layout,
        library=way.library,
        copy=way.copy,
    )
    fill(storage.tensors, 0)
    return storage


def read_all(storage):
    return [storage.read_block(block_id) for block_id in range(storage.num_blocks)]


def fill(tensors, seed):
    """Fill every element with random bytes, so that different places almost surely differ."""
    rng = np.random.default_rng(seed)
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            noise = rng.integers(0, 256, (*tensor.shape, tensor.itemsize), np.uint8)
            tensor[...] = noise.view(tensor.dtype)[..., 0]
        else:
            import torch

            noise = torch.from_numpy(rng.integers(0, 256, (*tensor.shape, tensor.element_size()), np.uint8))
            tensor.copy_(noise.view(tensor.dtype)[..., 0])


def move_in_model(arrays, layout, block_size, moves):
    """Apply moves in the slow model: whole arrays, one block at a time, plain indexing along one axis."""
    step = block_size if "T" in layout else 1
    for array in arrays:
        along = np.moveaxis(array, BLOCK_AXES[layout], 0)
        for source, target in moves:
            along[target * step : (target + 1) * step] = along[source * step : (source + 1) * step]


def draw_moves(seed, num_sources, num_targets=None):
    """Return a random plan within one storage, or to another storage if `num_targets` is given."""
    rng = random.Random(seed)
    if num_targets is not None:
        targets = rng.sample(range(num_targets), rng.randint(1, num_targets))
        return [(rng.randrange(num_sources), target) for target in targets]
    ids = rng.sample(range(num_sources), num_sources)
    if rng.random() < 0.5:  # plan with runs
        ids.sort()
    cut = rng.randint(1, num_sources - 1)
    sources, targets = ids[:cut], ids[cut:]
    if rng.random() < 0.5:
        sources, targets = targets, sources
    moves = [(rng.choice(sources), target) for target in targets]
    return list(zip(sources, targets, strict=False)) if rng.random() < 0.5 else moves
