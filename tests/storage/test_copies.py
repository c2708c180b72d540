"""One contract for all ways to copy: CPU, torch, Triton (interpreted), and torch and Triton on a GPU."""

import random

import numpy as np
import pytest
from storage.made_storage import (
    BLOCK_AXES,
    WAYS_TO_COPY,
    allocate,
    draw_moves,
    fill,
    make_way,
    move_in_model,
    read_all,
    to_numpy,
)

from kv_pool.storage import BlockStorage, KVStorage, SegmentTable


@pytest.fixture(params=WAYS_TO_COPY)
def way(request, monkeypatch):
    return make_way(request.param, monkeypatch)


def assert_moves_as_the_model(storage, layout, moves):
    """C4: each target equals its source, and no other byte of any tensor has changed."""
    expected = [to_numpy(tensor) for tensor in storage.tensors]
    storage.apply_moves(moves)
    move_in_model(expected, layout, storage.block_size, moves)
    storage.synchronize()
    for tensor, array in zip(storage.tensors, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(tensor).view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_random_moves_agree_with_the_model(way, layout, seed):
    storage = allocate(way, layout)
    assert_moves_as_the_model(storage, layout, draw_moves(seed, storage.num_blocks))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("layout", ["L|BNHC", "L|2BNHD", "2L|THD", "L|BND"])
def test_elements_of_any_width_are_copied(way, layout, dtype):
    storage = allocate(way, layout, dtype=dtype)
    assert_moves_as_the_model(storage, layout, [(6, 0), (5, 2)])


@pytest.mark.parametrize(
    ("head_size", "dtype", "alignment"), [(6, "float16", 4), (5, "float16", 2), (3, "uint8", 1)]
)
def test_spans_that_are_not_a_multiple_of_16_bytes(way, head_size, dtype, alignment):
    storage = allocate(way, "L|2BNHD", block_size=1, heads=1, head_size=head_size, dtype=dtype)
    assert storage.segments.alignment == alignment
    assert_moves_as_the_model(storage, "L|2BNHD", [(3, 1), (4, 2), (0, 6)])


@pytest.mark.parametrize("seed", range(2), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_chains_and_cycles_are_applied_simultaneously(way, layout, seed):
    storage = allocate(way, layout)
    rng = random.Random(seed)
    ids = rng.sample(range(storage.num_blocks), storage.num_blocks)
    moves = [(source, target) for source, target in enumerate(ids) if source != target][seed:]
    before = read_all(storage)
    expected = dict(enumerate(before)) | {target: before[source] for source, target in moves}
    storage.apply_moves(moves)
    storage.synchronize()
    assert read_all(storage) == list(expected.values())


@pytest.mark.parametrize("layout", ["L|BNHC", "|BLNHC", "2L|THD"])
def test_scratch_blocks_keep_content_between_calls(way, layout):
    storage = allocate(way, layout)
    before = read_all(storage)
    first, second = storage.scratch_ids[:2]
    storage.apply_moves([(1, second), (4, first)])
    storage.apply_moves([(2, 1), (5, 4)])
    storage.apply_moves([(second, 2), (first, 5), (0, 6)])
    storage.synchronize()
    expected = [before[block_id] for block_id in (0, 2, 1, 3, 5, 4, 0)]
    assert read_all(storage) == expected


def test_spans_longer_than_a_piece(way):
    # 20 KiB per span: more than the kernel's 16 KiB and not a multiple of it; whole rows on the CPU.
    storage = allocate(way, "L|2BNHD", 4, block_size=16, num_layers=1, heads=5, head_size=128)
    assert storage.segments.spans.tolist() == [20480, 20480]
    assert_moves_as_the_model(storage, "L|2BNHD", [(3, 0), (2, 1)])


def test_padding_between_blocks_is_not_written(way):
    # Three blocks of 8 tokens, of which the storage has the first 5: 3 tokens of each are not its own.
    whole = np.arange(2 * 6 * 8 * 3 * 16, dtype=np.int32).reshape(2, 6, 8, 3, 16)
    given = [way.make_tensor(whole[layer, :, :5]) for layer in range(2)]
    storage = KVStorage.wrap(given, "L|BNHC", dtype="float32", copy=way.copy)
    assert storage.block_bytes == 2 * 5 * 3 * 16 * 4
    behind = [make_root(tensor) for tensor in given]
    before = [to_numpy(root).reshape(whole.shape) for root in behind]
    storage.apply_moves([(0, 5), (1, 3)])
    storage.synchronize()
    for layer, (root, old) in enumerate(zip(behind, before, strict=True)):
        old[layer, 5, :5], old[layer, 3, :5] = old[layer, 0, :5], old[layer, 1, :5]
        np.testing.assert_array_equal(to_numpy(root).reshape(whole.shape), old)


def make_root(tensor):
    """Return all the memory that a tensor is a view of."""
    if isinstance(tensor, np.ndarray):
        return tensor.base
    import torch

    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def test_views_of_a_block_outermost_cache_form_one_span(way):
    # As in vLLM: one view per layer, (B, N, H, C), of one allocation (B, L, N, H, C).
    whole = way.make_tensor(np.arange(5 * 2 * 4 * 3 * 16, dtype=np.int16).reshape(5, 2, 4, 3, 16))
    views = [whole[:, layer] for layer in range(2)]
    storage = KVStorage.wrap(views, "L|BNHC", dtype="float16", copy=way.copy)
    assert len(storage.segments) == 1
    assert_moves_as_the_model(storage, "L|BNHC", [(4, 0), (3, 1)])


def test_memory_order_may_differ_from_axis_order(way):
    # The shape is B, N, H, C; in memory, heads are outermost, as native ROCm kernels require.
    memory = way.make_tensor(np.arange(3 * 5 * 4 * 16, dtype=np.int16).reshape(3, 5, 4, 16))
    order = (1, 2, 0, 3)
    view = memory.transpose(order) if way.library == "numpy" else memory.permute(order)
    storage = KVStorage.wrap([view], "L|BNHC", dtype="float16", copy=way.copy)
    assert storage.block_format == "float16 H=3 N=4 2=2 D=8"
    assert len(storage.segments) == 3
    assert_moves_as_the_model(storage, "L|BNHC", [(4, 0), (3, 1)])


@pytest.mark.parametrize("seed", range(3), ids=lambda seed: f"seed{seed}")
@pytest.mark.parametrize(
    ("here", "there"),
    [("L|BNHC", "|BLNHC"), ("L|2BNHD", "2L|THD"), ("L|BHNC", "L|HBNC"), ("2L|THD", "L|2BNHD")],
)
def test_blocks_are_copied_to_another_storage(way, here, there, seed):
    """Layouts may differ if the bytes of a block are in the same order: spans are cut alike."""
    source, target = allocate(way, here), allocate(way, there, num_blocks=5)
    fill(target.tensors, seed + 100)
    sent = read_all(source)
    expected = read_all(target)
    moves = draw_moves(seed, 7, num_targets=5)
    source.copy_to(target, moves)
    for source_id, target_id in moves:
        expected[target_id] = sent[source_id]
    assert read_all(target) == expected
    assert read_all(source) == sent


def test_state_without_tokens_is_moved(way):
    # As in Mamba: one convolution and one recurrent state per layer, of different types and shapes.
    conv = way.make_tensor(np.arange(6 * 4 * 10, dtype=np.int16).reshape(6, 4, 10))
    state = way.make_tensor(np.arange(6 * 2 * 8, dtype=np.float32).reshape(6, 2, 8))
    storage = BlockStorage.wrap_state([conv, state], copy=way.copy)
    assert storage.block_bytes == 4 * 10 * 2 + 2 * 8 * 4
    expected = to_numpy(conv), to_numpy(state)
    storage.apply_moves([(5, 0), (4, 2)])
    storage.synchronize()
    for tensor, array in zip((conv, state), expected, strict=True):
        array[0], array[2] = array[5], array[4]
        np.testing.assert_array_equal(to_numpy(tensor), array)


def test_groups_that_share_bytes_are_moved_once(way):
    # One group has 2 tensors in the allocation; the other has a wider one, over the first of them.
    memory = way.make_tensor(np.arange(2 * 6 * 64, dtype=np.uint8).reshape(2, 6, 64))
    small = BlockStorage.wrap_state([memory[0, :, :32], memory[1, :, :32]])
    wide = BlockStorage.wrap_state([memory[0]])
    table = SegmentTable.overlay([small.segments, wide.segments])
    assert table.spans.tolist() == [64, 32]
    both = BlockStorage(table, way.device, "overlaid", way.copy)
    expected = to_numpy(memory)
    both.apply_moves([(5, 1)])
    both.synchronize()
    expected[0, 1], expected[1, 1, :32] = expected[0, 5], expected[1, 5, :32]
    np.testing.assert_array_equal(to_numpy(memory), expected)
