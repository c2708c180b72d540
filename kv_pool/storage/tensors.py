"""Properties of NumPy arrays and torch tensors, through one interface."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_pool.storage.dtypes import bits_name


def find_memory(tensor: Any, owners: dict[int, Any]) -> tuple[int, Any]:
    """Return a tensor's address, and the object that keeps its memory alive.

    Tensors in the same allocation get the same object. `owners` maps allocations of torch to it.
    """
    if isinstance(tensor, np.ndarray):
        owner = tensor
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return tensor.ctypes.data, owner
    return tensor.data_ptr(), owners.setdefault(tensor.untyped_storage().data_ptr(), tensor)


def find_device(tensor: Any) -> str:
    """Return `cpu`, or torch's name of another device, such as `cuda:0`."""
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)


def find_strides_bytes(tensor: Any) -> tuple[int, ...]:
    """Return the stride of each axis, in bytes."""
    if isinstance(tensor, np.ndarray):
        return tensor.strides
    return tuple(step * tensor.element_size() for step in tensor.stride())


def find_dtype(tensor: Any) -> str:
    """Return the element type by torch's name. NumPy uses the same name for the types that it has."""
    return str(tensor.dtype).removeprefix("torch.")


def view_bits(tensor: Any) -> Any:
    """Return a view of a tensor or array as integers of the same width."""
    if isinstance(tensor, np.ndarray):
        return tensor.view(bits_name(tensor.itemsize))
    import torch

    return tensor.detach().view(getattr(torch, bits_name(tensor.element_size())))
