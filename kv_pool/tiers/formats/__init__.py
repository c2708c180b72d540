"""`make_format`: makes the block formats of lower tiers, raw bytes or lossy formats that need fewer bytes."""

from __future__ import annotations

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.storage.block_storage import BlockStorage
from kv_pool.tiers.formats.block_format import BlockFormat, read_axes
from kv_pool.tiers.formats.low_rank import DEFAULT_SIZE_RATIO, LowRankFormat
from kv_pool.tiers.formats.scaled import INT4, INT8, Float8Codes, ScaledFormat

__all__ = ["FORMATS", "BlockFormat", "make_format"]

FORMATS = ("raw", "int8", "int4", "fp8", "low_rank")


def make_format(name: str, blocks: BlockStorage | BlockLayout) -> BlockFormat:
    """Return the block format with this name, for the blocks of a storage.

        >>> from kv_pool.storage import KVStorage
        >>> from kv_pool.tiers.formats import make_format
        >>> storage = KVStorage.allocate(2, block_size=16, num_layers=2, num_kv_heads=4, head_size=64)
        >>> [(name, make_format(name, storage).encoded_bytes) for name in ("int8", "int4", "low_rank:0.25")]
        [('int8', 17664), ('int4', 9472), ('low_rank:0.25', 7680)]

    Args:
        name: one of `FORMATS`; `low_rank:0.5` sets the size ratio of low_rank.
        blocks: a storage or a layout.
    Raises:
        InvalidArgumentError: the name is unknown; or a format other than raw is requested for blocks without
            axes of tokens, heads and elements, or with elements other than float16, bfloat16 and float32.
        MissingDependencyError: fp8 is requested and ml_dtypes is not installed.
    """
    kind, colon, ratio = name.partition(":")
    if kind not in FORMATS or (colon and kind != "low_rank"):
        raise InvalidArgumentError(f"no format {name!r}; there are {', '.join(FORMATS)} and low_rank:RATIO")
    if kind == "raw":
        return BlockFormat(name, blocks.block_bytes, blocks.block_bytes)
    axes = read_axes(blocks)
    if kind == "fp8":
        return ScaledFormat(kind, axes, Float8Codes(), "ND", "ND")
    if kind in ("int8", "int4"):
        return ScaledFormat(kind, axes, INT8 if kind == "int8" else INT4, "N", "D")
    try:
        size_ratio = float(ratio) if colon else DEFAULT_SIZE_RATIO
    except ValueError:
        raise InvalidArgumentError(f"invalid format {name!r}: {ratio!r} is not a number") from None
    return LowRankFormat(axes, size_ratio)
