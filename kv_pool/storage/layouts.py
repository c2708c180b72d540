"""Layouts of a KV cache: the order of its axes, from which segment tables are made.

A layout is written `lists|axes`: the axes that the list of tensors runs over, then the axes of each tensor in
the order of its shape.

    L layers   2 K then V   B blocks   N tokens of a block   H heads   D elements of a head
    C = 2D     K and V of one head and token, adjacent
    T = BN     tokens of all blocks
    F = HND    all elements of one block and layer, K or V

A latent cache (MLA) has neither 2 nor C: one vector per token. The axes may be in another order in memory
than in the shape, because the strides of the tensors are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.segments import Segment

LAYOUTS = {
    "LBNHC": "L|BNHC",
    "NHD": "L|BNHC",
    "LBHNC": "L|BHNC",
    "HND": "L|BHNC",
    "LHBNC": "L|HBNC",
    "BLHNC": "|BLHNC",
    "BLNHC": "|BLNHC",
    "BHLNC": "|BHLNC",
    "L2BNHD": "L|2BNHD",
    "FLASH": "L|2BNHD",
    "LB2NHD": "L|B2NHD",
    "LB2HND": "L|B2HND",
    "2LTHD": "2L|THD",
    "SGLANG": "2L|THD",
    "BL2F": "|BL2F",
    "TRTLLM": "|BL2F",
    "LBND": "L|BND",
    "MLA": "L|BND",
}
"""Engine layouts by name. `NHD` and `HND` are vLLM's since 0.26; `FLASH` is vLLM's before that."""

COMPOSITE_AXES = {"C": "2D", "T": "BN", "F": "HND"}

_CANONICAL_ORDER = "L2HND"


@dataclass(frozen=True)
class Axis:
    """An axis of a tensor in memory: its letter, its size, and its stride in bytes."""

    letter: str
    size: int
    stride_bytes: int


@dataclass(frozen=True)
class TensorLayout:
    """A parsed layout: `lists` are the axes of the list of tensors, `axes` those of each tensor."""

    lists: str
    axes: str

    @property
    def letters(self) -> str:
        """All single axes; composite ones are split."""
        return self.lists + "".join(COMPOSITE_AXES.get(letter, letter) for letter in self.axes)

    @property
    def has_values(self) -> bool:
        """True for K and V, False for a latent cache with one vector per token."""
        return "2" in self.letters

    def __str__(self) -> str:
        return f"{self.lists}|{self.axes}"


def parse_layout(layout: str) -> TensorLayout:
    """Return a layout given by name (`NHD`, see LAYOUTS) or written out (`L|BNHC`).

    Raises:
        InvalidArgumentError: the layout is unknown, or an axis is missing or repeated.
    """
    written = LAYOUTS.get(layout.upper(), layout)
    lists, bar, axes = written.partition("|")
    if not bar:
        raise InvalidArgumentError(
            f"unknown layout {layout!r}; known are {', '.join(LAYOUTS)}, or write one out as 'L|BNHC'"
        )
    parsed = TensorLayout(lists, axes)
    letters = parsed.letters
    if len(set(letters)) != len(letters) or not set("LBND") <= set(letters) <= set("L2BNHD"):
        raise InvalidArgumentError(
            f"layout {written!r} has the axes {letters!r}; it needs L, B, N, D once each, and optionally 2, H"
        )
    if set(lists) - set("L2"):
        raise InvalidArgumentError(f"layout {written!r}: only L and 2 can be lists of tensors")
    if parsed.has_values and "H" not in letters:
        raise InvalidArgumentError(f"layout {written!r} has K and V but no heads")
    return parsed


def list_shape(layout: TensorLayout, sizes: Mapping[str, int]) -> tuple[int, tuple[int, ...]]:
    """Return the number of tensors of a storage of these sizes, and the shape of each."""
    return (
        prod(sizes[letter] for letter in layout.lists),
        tuple(prod(sizes[single] for single in COMPOSITE_AXES.get(letter, letter)) for letter in layout.axes),
    )


def find_sizes(
    layout: TensorLayout, num_tensors: int, shape: Sequence[int], known: Mapping[str, int | None]
) -> dict[str, int]:
    """Return the size of every single axis, from the tensors' shape and `known`.

    Raises:
        InvalidArgumentError: the shape does not fit the layout or `known`, or does not determine an axis.
    """
    sizes = {letter: size for letter, size in known.items() if size is not None}
    sizes["2"] = 2
    if len(shape) != len(layout.axes):
        raise InvalidArgumentError(
            f"a tensor of shape {tuple(shape)} has {len(shape)} axes, layout {layout} has {len(layout.axes)}"
        )
    seen = {layout.lists: num_tensors} if layout.lists else {}
    seen.update(zip(layout.axes, shape, strict=True))
    for letters, size in seen.items():
        singles = COMPOSITE_AXES.get(letters, letters)
        open_axes = [single for single in singles if single not in sizes]
        rest = prod(sizes[single] for single in singles if single in sizes)
        if len(open_axes) > 1:
            raise InvalidArgumentError(
                f"axis {letters} of layout {layout} has size {size} = {' x '.join(singles)}: "
                f"pass the size of {' or '.join(open_axes)}"
            )
        if open_axes and size % rest == 0:
            sizes[open_axes[0]] = size // rest
        elif open_axes or size != rest:
            raise InvalidArgumentError(
                f"axis {letters} of layout {layout} has size {size}, which is not "
                + " x ".join(f"{single}={sizes.get(single, '?')}" for single in singles)
            )
    if num_tensors != prod(sizes[letter] for letter in layout.lists):
        raise InvalidArgumentError(f"layout {layout} does not have {num_tensors} tensors")
    sizes.setdefault("H", 1)
    return sizes


def split_axes(layout: TensorLayout, sizes: Mapping[str, int], strides_bytes: Sequence[int]) -> list[Axis]:
    """Return the single axes of one tensor in the order of its shape; composite axes are split."""
    axes = []
    for letter, stride in zip(layout.axes, strides_bytes, strict=True):
        singles = COMPOSITE_AXES.get(letter, letter)
        for place, single in enumerate(singles):
            inner = prod(sizes[after] for after in singles[place + 1 :])
            axes.append(Axis(single, sizes[single], stride * inner))
    return axes


def find_segments(
    tensors: Sequence[tuple[int, Any, Sequence[Axis]]], lists: str, sizes: Mapping[str, int], itemsize: int
) -> tuple[list[Segment], str]:
    """Return the spans of a block, and the order of its bytes as axis letters, outermost first.

    Axes inside the block axis that are adjacent without a gap form one span; every other axis multiplies the
    number of spans. Layouts with the same spans have the same order: if two storages have equal orders, the
    bytes of their blocks correspond.

    Args:
        tensors: address, owner and axes of each tensor; all have the same axes.
        lists: the axes that the list of tensors runs over, the last one fastest.
        itemsize: bytes of one element.
    Raises:
        InvalidArgumentError: blocks overlap or are in descending order, or the elements of a head are not
            contiguous.
    """
    axes = tensors[0][2]
    block_stride = next(axis.stride_bytes for axis in axes if axis.letter == "B")
    if block_stride < itemsize:
        raise InvalidArgumentError(f"the stride between blocks is {block_stride} bytes: {list(axes)}")
    inner = [axis for axis in axes if axis.letter != "B" and axis.size > 1]
    inner.sort(key=lambda axis: axis.stride_bytes)
    span, span_letters = itemsize, ""
    outer: list[Axis] = []
    for axis in inner:
        if axis.stride_bytes == span < block_stride and not outer:
            span *= axis.size
            span_letters = axis.letter + span_letters
        else:
            outer.append(axis)
    if sizes["D"] > 1 and "D" not in span_letters:
        raise InvalidArgumentError(f"the {sizes['D']} elements of a head are not contiguous: {list(axes)}")
    # Any order of the spans would do; choose one that is the same for different layouts.
    inside = [axis for axis in reversed(outer) if axis.stride_bytes < block_stride]
    outside = [axis for axis in outer if axis.stride_bytes >= block_stride]
    outside.sort(key=lambda axis: _CANONICAL_ORDER.index(axis.letter))
    list_steps = {letter: range(sizes[letter]) for letter in lists}
    far = sorted([*lists, *(axis.letter for axis in outside)], key=_CANONICAL_ORDER.index)
    strides = {axis.letter: axis.stride_bytes for axis in outside}
    segments = []
    for steps in product(*(list_steps.get(letter, range(sizes[letter])) for letter in far)):
        at = dict(zip(far, steps, strict=True))
        address, owner, _ = tensors[find_tensor(lists, sizes, at)]
        address += sum(at[letter] * stride for letter, stride in strides.items())
        for places in product(*(range(axis.size) for axis in inside)):
            near = sum(place * axis.stride_bytes for place, axis in zip(places, inside, strict=True))
            segments.append(Segment(address + near, block_stride, span, owner))
    order = [letter for letter in far if sizes[letter] > 1]
    return segments, "".join([*order, *(axis.letter for axis in inside), span_letters])


def find_tensor(lists: str, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Return the index of the tensor that holds layer `at["L"]` and K or V `at["2"]`."""
    position = 0
    for letter in lists:
        position = position * sizes[letter] + at[letter]
    return position
