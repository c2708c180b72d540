"""Blocks with chosen numbers, and the error bound of each format, derived from its definition."""

import ml_dtypes
import numpy as np

from kv_pool.storage import KVStorage
from kv_pool.tiers.formats import make_format

DTYPES = ("float16", "bfloat16", "float32")
LOSSY = ("int8", "int4", "fp8", "low_rank")
UNITS = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134), "float32": (2.0**-24, 2.0**-150)}
"""Relative and absolute rounding error: half the distance to the next number, and half the smallest one."""
SMALLEST_SCALE = 2.0**-133


def numbers_of(dtype):
    return np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


def make_storage(dtype="float16", layout="NHD", num_blocks=3, block_size=4, heads=3, head_size=8, layers=2):
    return KVStorage.allocate(
        num_blocks, block_size, layers, heads if "H" in layout or "F" in layout else 1, head_size, dtype,
        layout=layout,
    )  # fmt: skip


def to_stored(values, dtype):
    """Convert numbers to the form that `KVStorage.write` takes."""
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(values).astype(numbers_of(dtype))
    return made.view(np.uint16) if dtype == "bfloat16" else made


def write_all(storage, values):
    """Write values, (layers, 2, blocks * block_size, heads, head_size), to every slot."""
    slots = np.arange(storage.num_slots)
    for layer in range(storage.num_layers):
        key, value = (to_stored(values[layer, which], storage.dtype) for which in range(2))
        storage.write(layer, slots, key, value if storage.has_values else None)


def read_all(storage):
    """Return the content of every slot as float64, (layers, 1 or 2, slots, heads, head_size)."""
    slots = np.arange(storage.num_slots)
    found = [
        [part for part in storage.read(layer, slots) if part is not None]
        for layer in range(storage.num_layers)
    ]
    array = np.array(found)
    return (array.view(numbers_of("bfloat16")) if storage.dtype == "bfloat16" else array).astype(np.float64)


def read_blocks(storage):
    """Return all blocks, (num_blocks, block_bytes) uint8."""
    rows = [np.frombuffer(storage.read_block(block), np.uint8) for block in range(storage.num_blocks)]
    return np.stack(rows)


def pass_through(storage, name):
    """Encode and decode all blocks. Return the content before and after, as from `read_all`."""
    made = make_format(name, storage)
    before = read_all(storage)
    blocks = read_blocks(storage)
    encoded = made.encode(blocks)
    assert encoded.shape == (storage.num_blocks, made.encoded_bytes)
    for block, row in enumerate(made.decode(encoded)):
        storage.write_block(block, row.tobytes())
    return before, read_all(storage)


def find_bound(name, before, storage):
    """Return the maximum error of each finite element, in the shape of `before`."""
    layers, parts, slots, heads, head_size = before.shape
    grouped = np.where(np.isfinite(before), np.abs(before), 0)
    grouped = grouped.reshape(
        layers, parts, slots // storage.block_size, storage.block_size, heads, head_size
    )
    relative, least = UNITS[storage.dtype]
    largest = np.empty_like(grouped)
    for part in range(parts):
        axes = (2, 4) if name == "fp8" else (2,) if part == 0 and parts == 2 else (4,)
        largest[:, part] = grouped[:, part].max(axes, keepdims=True)
    codes = {"int8": 126, "int4": 7, "fp8": 416}[name]
    scale = largest / codes * (1 + 2.0**-7) + SMALLEST_SCALE
    size = grouped
    coded = scale / 2 if name != "fp8" else np.maximum(size / 16, scale / 1024)
    in_float32 = (size + scale) * 2.0**-22  # two roundings on the way there, one on the way back
    coded = coded + codes * 2.0**-149  # where a scale underflows
    return ((coded + in_float32) * (1 + relative) + size * relative + least + 2.0**-149).reshape(before.shape)


def check_low_rank(before, after, storage):
    """Check the Frobenius error of each (N, D) matrix: Eckart-Young plus rounding. NaN spoils a matrix."""
    shape = (*before.shape[:2], storage.num_blocks, storage.block_size, *before.shape[3:])
    before, after = (np.moveaxis(values.reshape(shape), 4, 3) for values in (before, after))
    is_whole = np.isfinite(before).all((-2, -1), keepdims=True)
    assert np.isnan(after[~np.broadcast_to(is_whole, after.shape)]).all()
    matrices = np.where(is_whole, before, 0)
    tokens, head_size = matrices.shape[-2:]
    relative, least = UNITS[storage.dtype]
    rank = make_format("low_rank", storage).rank
    values = np.linalg.svd(matrices, compute_uv=False)
    kept, tail = values[..., :rank], np.linalg.norm(values[..., rank:], axis=-1)
    norm = np.linalg.norm(values, axis=-1)
    # Each factor is rounded: a column l of one, a row r of the other, both as long as the root of its value.
    lost = least * (np.sqrt(tokens) + np.sqrt(head_size))
    factors = (kept * (2 * relative + relative**2) + np.sqrt(kept) * lost * (1 + relative)).sum(-1)
    factors += rank * least**2 * np.sqrt(tokens * head_size)
    decomposed = (tokens + head_size) * 2.0**-23 * norm
    rounded = relative * (norm + tail) + least * np.sqrt(tokens * head_size)
    off = np.linalg.norm(np.where(is_whole, after, 0) - matrices, axis=(-2, -1))
    assert (off <= (tail + factors + decomposed + rounded) * (1 + 2.0**-10)).all()
