"""What NumPy arrays and torch tensors have in common, asked of either."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_pool.storage.dtypes import bits_name


def find_place(tensor: Any, owners: dict[int, Any]) -> tuple[int, Any]:
    """Where a tensor begins, and what keeps its memory alive: one object for all of one allocation."""
    if isinstance(tensor, np.ndarray):
        owner = tensor
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return tensor.ctypes.data, owner
    return tensor.data_ptr(), owners.setdefault(tensor.untyped_storage().data_ptr(), tensor)


def find_device(tensor: Any) -> str:
    """`cpu`, or torch's name of another, such as `cuda:0`."""
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)


def find_strides_bytes(tensor: Any) -> tuple[int, ...]:
    """Bytes from one step to the next along each axis."""
    if isinstance(tensor, np.ndarray):
        return tensor.strides
    return tuple(step * tensor.element_size() for step in tensor.stride())


def find_dtype(tensor: Any) -> str:
    """The element type by torch's name, which is NumPy's too where both have it."""
    return str(tensor.dtype).removeprefix("torch.")


def view_bits(tensor: Any) -> Any:
    """A tensor or array as integers of the same width, on its own memory."""
    if isinstance(tensor, np.ndarray):
        return tensor.view(bits_name(tensor.itemsize))
    import torch

    return tensor.detach().view(getattr(torch, bits_name(tensor.element_size())))
