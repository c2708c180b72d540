"""Tests of the block formats: errors within each format's bound, for every layout and element type."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from storage.made_storage import BLOCK_AXES
from tiers.formats.made_blocks import (
    DTYPES,
    LOSSY,
    check_low_rank,
    find_bound,
    make_storage,
    numbers_of,
    pass_through,
    read_blocks,
    write_all,
)

from kv_pool.errors import InvalidArgumentError
from kv_pool.storage import BlockStorage, KVStorage
from kv_pool.storage.block_layout import BlockLayout
from kv_pool.tiers.formats import FORMATS, make_format
from kv_pool.tiers.formats.block_format import read_axes
from kv_pool.tiers.formats.scaled import INT8, ScaledFormat

SHAPE = (2, 2, 12, 3, 8)  # layers, K and V, slots, heads, elements: as `make_storage` makes it


def check(name, before, after, storage):
    if name == "low_rank":
        check_low_rank(before, after, storage)
        return
    is_finite = np.isfinite(before)
    if name == "int4":
        assert np.isnan(after[~is_finite]).all()
    else:
        np.testing.assert_array_equal(after[~is_finite], before[~is_finite])
    bound = find_bound(name, before, storage)
    off = np.abs(np.subtract(after, before, where=is_finite, out=np.zeros_like(before)))
    worst = np.argmax(off - bound)
    assert (off <= bound)[is_finite].all(), (before.flat[worst], after.flat[worst], bound.flat[worst])


@pytest.mark.parametrize("layout", BLOCK_AXES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_noise_is_decoded_within_the_bound(name, dtype, layout):
    storage = make_storage(dtype, layout)
    rng = np.random.default_rng(3)
    heads = storage.num_kv_heads
    values = rng.standard_normal((2, 2, 12, heads, 8)) * np.exp(rng.normal(0, 2, (2, 2, 1, heads, 8)))
    write_all(storage, values)
    before, after = pass_through(storage, name)
    if name == "raw":
        np.testing.assert_array_equal(after, before)
    else:
        check(name, before, after, storage)
        assert (after != before).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_arbitrary_bits_are_decoded_within_the_bound(name, dtype, data):
    """Random elements with arbitrary bits: infinities, NaN, the smallest and the largest."""
    storage = make_storage(dtype)
    size = numbers_of(dtype).itemsize
    bits = data.draw(
        hnp.arrays(f"uint{8 * size}", SHAPE, elements=hnp.from_dtype(np.dtype(f"uint{8 * size}")))
    )
    if data.draw(st.booleans()):
        is_exotic = np.isin(
            np.arange(bits.size), data.draw(st.lists(st.integers(0, bits.size - 1), max_size=5))
        )
        seed = data.draw(st.integers(0, 100))
        noise = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
        noise = noise.astype(numbers_of(dtype)).view(bits.dtype)
        bits = np.where(is_exotic.reshape(SHAPE), bits, noise)
    with np.errstate(invalid="ignore"):
        values = bits.view(numbers_of(dtype)).astype(np.float64)
    write_all(storage, values)
    before, after = pass_through(storage, name)
    check(name, before, after, storage)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-9, 0, 7])
@pytest.mark.parametrize(("name", "largest"), [("int8", 126), ("int4", 7)])
def test_integers_are_exact_for_representable_numbers(name, largest, dtype, exponent):
    storage = make_storage(dtype)
    levels = np.random.default_rng(5).integers(-largest, largest + 1, SHAPE)
    levels[:, 0, ::4] = largest  # the first token of each block has the largest of each channel,
    levels[:, 1, ..., 0] = -largest  # and the first channel the largest of each token
    write_all(storage, levels * 2.0**exponent)
    before, after = pass_through(storage, name)
    np.testing.assert_array_equal(after, before)
    assert before.max() == largest * 2.0**exponent


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-9, 0, 6])
def test_fp8_is_exact_for_representable_numbers(dtype, exponent):
    storage = make_storage(dtype)
    rng = np.random.default_rng(6)
    mantissas = rng.integers(8, 16, SHAPE) * rng.choice([-1, 1], SHAPE)
    values = mantissas * 2.0 ** rng.integers(-9, 5, SHAPE)
    values[:, :, ::4, :, 0] = 416  # the largest of each head
    write_all(storage, values * 2.0**exponent)
    before, after = pass_through(storage, "fp8")
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_numbers_stay_finite(name, dtype):
    largest = float(np.finfo(np.float16).max) if dtype == "float16" else float(np.finfo(np.float32).max)
    if dtype == "bfloat16":
        largest = float(np.uint32(0x7F7F0000).view(np.float32))
    for values in (np.full(SHAPE, largest), np.full(SHAPE, -largest), np.full(SHAPE, 6e-8)):
        storage = make_storage(dtype)
        write_all(storage, values)
        before, after = pass_through(storage, name)
        assert np.isfinite(after).all()
        check(name, before, after, storage)


def test_low_rank_is_exact_for_low_rank_blocks():
    storage = make_storage("float32", block_size=16, head_size=16)
    rng = np.random.default_rng(8)
    rank = make_format("low_rank", storage).rank
    left = rng.standard_normal((2, 2, 3, 3, 16, rank))
    right = rng.standard_normal((2, 2, 3, 3, rank, 16))
    values = np.moveaxis(left @ right, 3, 4).reshape(2, 2, 48, 3, 16)
    write_all(storage, values)
    before, after = pass_through(storage, "low_rank")
    assert rank == 4
    assert np.linalg.norm(after - before) < 1e-5 * np.linalg.norm(before)


@pytest.mark.parametrize("name", FORMATS)
def test_each_block_is_encoded_separately(name):
    """The result does not depend on the other blocks or on the chunks."""
    storage = make_storage("float16", num_blocks=7, block_size=16, head_size=64, layers=8, heads=8)
    write_all(storage, np.random.default_rng(9).standard_normal((8, 2, 7 * 16, 8, 64)))
    made = make_format(name, storage)
    blocks = read_blocks(storage)
    together = made.encode(blocks)
    for block in range(7):
        np.testing.assert_array_equal(made.encode(blocks[block : block + 1])[0], together[block])
        np.testing.assert_array_equal(
            made.decode(together[block : block + 1])[0], made.decode(together)[block]
        )
    assert made.encode(blocks[:0]).shape == (0, made.encoded_bytes)
    assert made.decode(together[:0]).shape == blocks[:0].shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_arbitrary_bytes_decode_without_errors(name, dtype):
    made = make_format(name, make_storage(dtype))
    noise = np.random.default_rng(1).integers(0, 256, (5, made.encoded_bytes), np.uint8)
    assert made.decode(noise).shape == (5, make_storage(dtype).block_bytes)


def test_int4_packs_two_codes_per_byte():
    storage = make_storage("float32", block_size=3, heads=1, head_size=3, layers=1, layout="MLA")
    made = make_format("int4", storage)
    assert made.encoded_bytes == 5 + 2 * 3  # 9 elements, a scale for each of 3 tokens
    write_all(storage, np.arange(27).reshape(1, 1, 9, 1, 3) * np.ones((1, 2, 1, 1, 1)))
    before, after = pass_through(storage, "int4")
    check("int4", before, after, storage)


def test_int8_scale_groups_can_be_chosen():
    storage = make_storage("float32")
    axes = read_axes(storage)
    per_channel, per_token, both = (
        ScaledFormat("int8", axes, INT8, group, group) for group in ("N", "D", "ND")
    )
    elements = axes.num_elements
    assert per_channel.encoded_bytes == elements + 2 * elements // 4
    assert per_token.encoded_bytes == elements + 2 * elements // 8
    assert both.encoded_bytes == elements + 2 * elements // 32


@pytest.mark.parametrize("name", [*FORMATS, "low_rank:0.25"])
def test_format_is_recreated_from_name_and_layout(name):
    storage = make_storage(block_size=16)
    layout = BlockLayout.describe(storage, 16)
    made = make_format(name, storage)
    again = make_format(made.name, layout)
    assert (again.name, again.encoded_bytes) == (made.name, made.encoded_bytes)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_formats_refuse_state_blocks(name):
    storage = BlockStorage.wrap_state([np.zeros((4, 3, 5), np.float32), np.zeros((4, 8), np.float16)])
    with pytest.raises(InvalidArgumentError, match="have no axes of tokens, heads and elements"):
        make_format(name, storage)
    raw = make_format("raw", storage)
    blocks = np.arange(4 * storage.block_bytes).astype(np.uint8).reshape(4, -1)
    np.testing.assert_array_equal(raw.decode(raw.encode(blocks)), blocks)


def test_invalid_names_and_shapes_are_refused():
    storage = make_storage()
    with pytest.raises(
        InvalidArgumentError, match="no format 'int2'; there are raw, int8, int4, fp8, low_rank"
    ):
        make_format("int2", storage)
    for name in ("int8:0.5", "low_rank:", "low_rank:x", "low_rank:0", "low_rank:1.5", "low_rank:nan"):
        with pytest.raises(InvalidArgumentError):
            make_format(name, storage)
    with pytest.raises(InvalidArgumentError, match="elements of float64 cannot be compressed"):
        make_format("int8", KVStorage.allocate(2, 4, 2, 2, 8, "float64"))
    with pytest.raises(InvalidArgumentError, match="1 tokens and 8 elements takes 8 elements"):
        make_format("low_rank", make_storage(block_size=1))
    wrong = BlockLayout("float16 L=2 N=4", 10, 4)
    with pytest.raises(InvalidArgumentError, match="have 16 bytes, not 10"):
        make_format("int8", wrong)
    for name in FORMATS:
        made = make_format(name, storage)
        for rows in (
            np.zeros(storage.block_bytes, np.uint8),
            np.zeros((2, storage.block_bytes + 1), np.uint8),
            np.zeros((2, storage.block_bytes), np.int8),
        ):
            with pytest.raises(InvalidArgumentError, match="and type uint8, not"):
                made.encode(rows)
        with pytest.raises(InvalidArgumentError, match="and type uint8, not"):
            made.decode(np.zeros((1, made.encoded_bytes - 1), np.uint8))


def test_only_fp8_needs_ml_dtypes():
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from kv_pool.errors import MissingDependencyError\n"
        "from kv_pool.storage import KVStorage\n"
        "from kv_pool.tiers.formats import FORMATS, make_format\n"
        "storage = KVStorage.allocate(2, 16, 2, 2, 8)\n"
        "for name in FORMATS:\n"
        "    try: print(make_format(name, storage).name)\n"
        "    except MissingDependencyError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == [
        "raw",
        "int8",
        "int4",
        "the block format fp8 needs ml_dtypes: pip install '.[formats]' in a checkout of kv_pool",
        "low_rank:0.5",
    ]
