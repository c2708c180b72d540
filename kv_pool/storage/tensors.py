"""Element types by name, and the properties of NumPy arrays and torch tensors through one interface."""

from __future__ import annotations

from typing import Any

import numpy as np

from kv_pool.errors import InvalidArgumentError

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element, by torch's name. Blocks are copied as bytes: only `write` and `read` use the type."""

# Signed, because torch indexing supports few of the wider unsigned types.
_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def find_dtype_bytes(name: str) -> int:
    """Return the bytes of one element. Raise InvalidArgumentError with the known types."""
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError(f"unknown dtype {name!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's type of that name, or unsigned integers of the same width (bfloat16, float8)."""
    if name.startswith(("bfloat", "float8")):
        return np.dtype(f"u{find_dtype_bytes(name)}")
    return np.dtype(name)


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
    """Return a view of a tensor or array as integers of the same width.

    On the CPU always as NumPy, because torch indexes slowly there.
    """
    if isinstance(tensor, np.ndarray):
        return tensor.view(_BITS[tensor.itemsize])
    import torch

    bits = tensor.detach().view(getattr(torch, _BITS[tensor.element_size()]))
    return bits.numpy() if bits.device.type == "cpu" else bits
