"""`KVStorage`: K and V of every token slot, in any engine's layout, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from kv_pool.errors import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.storage.block_storage import BlockStorage, CopyBlocks
from kv_pool.storage.layouts import (
    TensorLayout,
    find_segments,
    find_sizes,
    find_tensor,
    list_shape,
    parse_layout,
    split_axes,
)
from kv_pool.storage.segments import SegmentTable
from kv_pool.storage.tensors import (
    find_device,
    find_dtype,
    find_dtype_bytes,
    find_memory,
    find_strides_bytes,
    numpy_dtype,
    view_bits,
)

_PAGE_BYTES = 4096


class KVStorage(BlockStorage):
    """A storage of K and V by slot, where slot = block_id * block_size + offset.

    >>> import numpy as np
    >>> from kv_pool import BlockMove
    >>> from kv_pool.storage import KVStorage
    >>> storage = KVStorage.allocate(num_blocks=10, block_size=16, num_layers=2, num_kv_heads=4, head_size=64)
    >>> key = np.full((1, 4, 64), 3, np.float16)                   # (num_tokens, num_kv_heads, head_size)
    >>> storage.write(layer=1, slots=[7 * 16 + 5], key=key, value=-key)
    >>> storage.apply_moves([BlockMove(source=7, target=2)])
    >>> _, value = storage.read(layer=1, slots=[2 * 16 + 5])
    >>> float(value[0, 0, 0])
    -3.0

    Created by `allocate` or `wrap`. A latent cache (layout `MLA`) has keys only: one head, no values.

    Attributes:
        num_blocks, block_size, num_layers, num_kv_heads, head_size, dtype: sizes in blocks, tokens, layers,
            heads, elements; dtype by torch's name.
        device: `cpu`, `cuda:0`, ...
        layout: the layout written out, such as `L|BNHC`.
        tensors: the tensors that the engine uses, in the layout's order: NumPy arrays or torch tensors.
        segments, block_bytes, block_format: see `BlockStorage`.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        layout: TensorLayout,
        sizes: dict[str, int],
        dtype: str,
        copy: CopyBlocks | None = None,
    ) -> None:
        self.tensors = list(tensors)
        self.layout = str(layout)
        self.dtype = dtype
        self.num_layers = sizes["L"]
        self.block_size = sizes["N"]
        self.num_kv_heads = sizes["H"]
        self.head_size = sizes["D"]
        self._is_torch = not isinstance(tensors[0], np.ndarray)
        itemsize = find_dtype_bytes(dtype)
        owners: dict[int, Any] = {}
        described = [
            (*find_memory(tensor, owners), split_axes(layout, sizes, find_strides_bytes(tensor)))
            for tensor in tensors
        ]
        segments, order = find_segments(described, layout.lists, sizes, itemsize)
        device = find_device(tensors[0])
        block_format = f"{dtype} " + " ".join(f"{letter}={sizes[letter]}" for letter in order)
        super().__init__(SegmentTable.from_segments(segments, sizes["B"]), device, block_format, copy)
        self._lists, self._sizes, self._axes = layout.lists, sizes, described[0][2]
        parts = range(2 if layout.has_values else 1)
        self._views = [
            tuple(self._view_tokens(layer, which, view_bits) for which in parts)
            for layer in range(self.num_layers)
        ]

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str = "float16",
        device: str = "cpu",
        layout: str = "NHD",
        *,
        library: Literal["numpy", "torch"] | None = None,
        copy: CopyBlocks | None = None,
    ) -> KVStorage:
        """Return a storage in new memory, filled with zeros, all tensors in one allocation.

        Args:
            num_blocks: number of blocks, the null block included, as in the pool.
            num_kv_heads: 1 for a latent cache, whose head_size is the length of its vector.
            dtype: see `DTYPE_BYTES`.
            layout: see `LAYOUTS`.
            library: library of `tensors` and of the results of `read`. None: NumPy on the CPU, which does
                not need torch, and torch elsewhere. NumPy has no bfloat16 or float8 and stores their bits as
                unsigned integers.
            copy: see `BlockStorage`.
        Raises:
            InvalidArgumentError: a size below 1, an unknown name, or NumPy on a device other than the CPU.
        """
        sizes = {
            "B": num_blocks,
            "N": block_size,
            "L": num_layers,
            "H": num_kv_heads,
            "D": head_size,
            "2": 2,
        }
        if min(sizes.values()) < 1:
            raise InvalidArgumentError(f"every size must be at least 1: {sizes}")
        parsed = parse_layout(layout)
        if "H" not in parsed.letters and num_kv_heads != 1:
            raise InvalidArgumentError(
                f"layout {parsed} has no heads, so num_kv_heads must be 1, not {num_kv_heads}"
            )
        num_tensors, shape = list_shape(parsed, sizes)
        num_bytes = prod(shape) * find_dtype_bytes(dtype)
        if library == "numpy" and device != "cpu":
            raise InvalidArgumentError(f"NumPy arrays are on the CPU, not on {device}")
        tensors: list[Any]
        if device == "cpu" and library != "torch":
            # Align to a page, as a tensor allocator would.
            whole = np.zeros(num_tensors * num_bytes + _PAGE_BYTES, np.uint8)
            whole = whole[-whole.ctypes.data % _PAGE_BYTES :][: num_tensors * num_bytes]
            tensors = [
                part.view(numpy_dtype(dtype)).reshape(shape) for part in whole.reshape(num_tensors, num_bytes)
            ]
        else:
            import torch

            tensors = list(torch.zeros((num_tensors, *shape), dtype=getattr(torch, dtype), device=device))
        return cls(tensors, parsed, sizes, dtype, copy)

    @classmethod
    def wrap(
        cls,
        tensors: Any,
        layout: str = "NHD",
        *,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        dtype: str | None = None,
        copy: CopyBlocks | None = None,
    ) -> KVStorage:
        """Return a storage over an engine's tensors, which it reads and writes in place and keeps alive.

        Args:
            tensors: one tensor or array, or a list with one per step of the layout's list axes, the last
                list axis fastest. The shapes are the layout's axes in order. Strides are read from the
                tensors, so axes may be in any memory order and padded.
            layout: a name of `LAYOUTS`, or written out as in layouts.py. For a block-outermost cache of which
                the engine has one view per layer, use `L|BNHC`: the spans of a block are joined again.
            block_size, num_kv_heads, head_size: required if a composite axis (T, F) hides them; otherwise
                checked.
            dtype: required if NumPy arrays hold the bits of a type that NumPy does not have.
        Raises:
            InvalidArgumentError: shapes, strides, devices or types differ or do not fit the layout.
        """
        listed = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
        if not listed:
            raise InvalidArgumentError("no tensors to wrap")
        kinds = {(tuple(tensor.shape), find_strides_bytes(tensor), find_dtype(tensor)) for tensor in listed}
        devices = {find_device(tensor) for tensor in listed}
        if len(kinds) > 1 or len(devices) > 1:
            raise InvalidArgumentError(
                f"the tensors of a storage must be alike: {sorted(kinds)} on {sorted(devices)}"
            )
        parsed = parse_layout(layout)
        known = {"N": block_size, "H": num_kv_heads, "D": head_size}
        sizes = find_sizes(parsed, len(listed), listed[0].shape, known)
        found = find_dtype(listed[0])
        if dtype is not None and find_dtype_bytes(dtype) != listed[0].dtype.itemsize:
            raise InvalidArgumentError(f"elements of {found} and {dtype} differ in size")
        return cls(listed, parsed, sizes, dtype or found, copy)

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def has_values(self) -> bool:
        """True for K and V, False for a latent cache with one vector per token."""
        return len(self._views[0]) == 2

    def write(self, layer: int, slots: Any, key: Any, value: Any = None) -> None:
        """Store K and V of tokens.

        Args:
            layer: 0 to num_layers - 1.
            slots: (num_tokens,), integers, distinct. With repeated slots, the result is undefined.
            key, value: (num_tokens, num_kv_heads, head_size), self.dtype, NumPy or torch. They may be on any
                device if this storage is on the CPU, otherwise on self.device. In NumPy, types that it does
                not have are passed as unsigned integers. `value` is None for a latent cache.
        Raises:
            InvalidArgumentError: an unknown layer, a wrong shape, a missing value, or a value for a latent
                cache.
            InvalidBlockError: a slot is out of range; not checked if `slots` is on a GPU, because that would
                synchronize.
            InvalidTypeError: a wrong dtype. In all cases nothing was written.
        """
        views = self._get_views(layer)
        blocks, offsets = self._split_slots(slots)
        given = [key, value] if self.has_values else [key]
        if not self.has_values and value is not None:
            raise InvalidArgumentError("a latent cache has no values: pass the vectors as key")
        shape = (len(blocks), self.num_kv_heads, self.head_size)
        contents = []
        for name, tensor in zip(("key", "value"), given, strict=False):
            if tensor is None or tuple(tensor.shape) != shape:
                found = None if tensor is None else tuple(tensor.shape)
                raise InvalidArgumentError(f"{name} has shape {found}; {len(blocks)} slots need {shape}")
            contents.append(self._take_bits(name, tensor))
        for view, content in zip(views, contents, strict=True):
            view[blocks, offsets] = content

    def read(self, layer: int, slots: Any) -> tuple[Any, Any]:
        """Return copies of K and V of tokens.

        Returns:
            (key, value): each (num_tokens, num_kv_heads, head_size), self.dtype; NumPy arrays or torch
            tensors on self.device, as `tensors` are. The value of a latent cache is None. In storages made
            by `allocate`, slots that were never written hold zeros.
        Raises:
            InvalidArgumentError, InvalidBlockError, InvalidTypeError: as `write`, for `layer` and `slots`.
        """
        views = self._get_views(layer)
        blocks, offsets = self._split_slots(slots)
        found = [self._from_bits(view[blocks, offsets]) for view in views]
        return found[0], found[1] if self.has_values else None

    def get_caches(self, layer: int) -> tuple[Any, Any]:
        """Return a layer's K and V as torch views of this storage's memory, for attention kernels.

        Returns:
            (key, value): each (num_blocks, block_size, num_kv_heads, head_size), self.dtype, on self.device,
            with the layout's strides; the elements of a head are contiguous. The value of a latent cache is
            None. After `resize` they still refer to the old memory.
        Raises:
            InvalidArgumentError: an unknown layer.
        """
        import torch

        dtype = getattr(torch, self.dtype)
        found = [
            self._view_tokens(layer, which, lambda tensor: torch.as_tensor(tensor).view(dtype))
            for which in range(len(self._get_views(layer)))
        ]
        return found[0], found[1] if self.has_values else None

    def resize(self, num_blocks: int) -> None:
        """Move to new memory of `num_blocks` blocks. Existing blocks keep their bytes; new ones are zero.

        `tensors` and `segments` are replaced, so the engine has to read them again. The old memory is freed
        when nothing refers to it; until then, both exist. Blocks at or above `num_blocks` are lost: move
        blocks in use to lower ids first.

        Raises:
            InvalidArgumentError: `num_blocks` is below 1, or the storage wraps tensors whose axes are in
                another order in memory than in their shape.
            CopyFailedError: the copy failed. The storage has not changed.
        """
        made = KVStorage.allocate(
            num_blocks,
            self.block_size,
            self.num_layers,
            self.num_kv_heads,
            self.head_size,
            self.dtype,
            self.device,
            self.layout,
            library="torch" if self._is_torch else "numpy",
            copy=self._copy,
        )
        kept = np.arange(min(num_blocks, self.num_blocks))
        self.copy_to(made, np.stack([kept, kept], axis=1))
        self.tensors, self.segments = made.tensors, made.segments
        self._views, self._axes = made._views, made._axes
        self._scratch = None

    def _view_tokens(self, layer: int, which: int, convert: Callable[[Any], Any]) -> Any:
        """Return a view of one layer's K or V: (num_blocks, block_size, num_kv_heads, head_size).

        Args:
            which: 0 for K, 1 for V.
            convert: returns the view of a tensor of which it is a part.
        """
        at = {"L": layer, "2": which}
        view = convert(self.tensors[find_tensor(self._lists, self._sizes, at)])
        view = view.reshape([axis.size for axis in self._axes])
        letters = [axis.letter for axis in self._axes]
        view = view[tuple(at.get(letter, slice(None)) for letter in letters)]
        letters = [letter for letter in letters if letter not in at]
        if "H" not in letters:
            view = view[..., None]
            letters.append("H")
        order = [letters.index(letter) for letter in "BNHD"]
        return view.transpose(order) if isinstance(view, np.ndarray) else view.permute(order)

    def _get_views(self, layer: int) -> tuple[Any, ...]:
        if not 0 <= layer < self.num_layers:
            raise InvalidArgumentError(f"layer {layer} is not one of 0 to {self.num_layers - 1}")
        return self._views[layer]

    def _split_slots(self, slots: Any) -> tuple[Any, Any]:
        """Return block ids and offsets, each (num_tokens,): NumPy on the CPU, else torch on self.device."""
        on_gpu = getattr(slots, "is_cuda", False)
        slots = slots if on_gpu else np.asarray(slots)
        if slots.is_floating_point() if on_gpu else slots.size and slots.dtype.kind not in "iu":
            raise InvalidTypeError(f"slots must be integers, not {slots.dtype}")
        if slots.ndim != 1:
            raise InvalidArgumentError(f"slots must have one axis, not shape {tuple(slots.shape)}")
        if not on_gpu and len(slots) and not 0 <= slots.min() <= slots.max() < self.num_slots:
            outside = slots[(slots < 0) | (slots >= self.num_slots)]
            raise InvalidBlockError(f"slot {outside[0]} is not one of 0 to {self.num_slots - 1}")
        if self.device == "cpu":
            slots = np.asarray(slots.cpu() if on_gpu else slots, np.int64)
        else:
            import torch

            slots = torch.as_tensor(slots, dtype=torch.int64, device=self.device)
        return slots // self.block_size, slots % self.block_size

    def _take_bits(self, name: str, tensor: Any) -> Any:
        """Return the caller's elements as integers of the same width, on this storage's device."""
        is_array = isinstance(tensor, np.ndarray)
        dtype = find_dtype(tensor)
        if dtype != self.dtype and not (is_array and tensor.dtype == numpy_dtype(self.dtype)):
            raise InvalidTypeError(f"{name} has dtype {dtype}; this storage has {self.dtype}")
        bits = view_bits(tensor)
        if self.device == "cpu":
            return bits if isinstance(bits, np.ndarray) else bits.cpu().numpy()
        if is_array:
            import torch

            return torch.from_numpy(np.ascontiguousarray(bits)).to(self.device)
        if str(tensor.device) != self.device:
            raise InvalidArgumentError(f"{name} is on {tensor.device}; this storage is on {self.device}")
        return bits

    def _from_bits(self, bits: Any) -> Any:
        """Return integers as elements of self.dtype, in the library of this storage's tensors."""
        if not self._is_torch:
            return bits.view(numpy_dtype(self.dtype))
        import torch

        tensor = torch.from_numpy(bits) if isinstance(bits, np.ndarray) else bits
        return tensor.view(getattr(torch, self.dtype))
