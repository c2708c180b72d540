"""Blocks as bytes: copies between devices, and what `BlockStorage` refuses. Copies: test_copies.py."""

import numpy as np
import pytest
from storage.made_storage import BLOCK_AXES, allocate, draw_moves, fill, make_way, read_all

from kv_pool import InvalidArgumentError, InvalidBlockError
from kv_pool.storage import BlockStorage, KVStorage
from kv_pool.storage.block_storage import copy_through_buffers


@pytest.mark.torch
@pytest.mark.parametrize("buffer_bytes", [1, 2000, 10**6])
@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_blocks_pass_through_buffers_of_any_size(layout, buffer_bytes, monkeypatch):
    """The path between two devices, run on the CPU, which every machine has."""
    way = make_way("cpu", monkeypatch)
    source, target = allocate(way, layout), allocate(way, layout, num_blocks=5)
    fill(target.tensors, 1)
    sent, expected = read_all(source), read_all(target)
    moves = draw_moves(layout, 7, num_targets=5)
    sources, targets = np.array(moves, np.int64).T
    copy_through_buffers(source, target, sources, targets, buffer_bytes)
    for source_id, target_id in moves:
        expected[target_id] = sent[source_id]
    assert read_all(target) == expected
    assert read_all(source) == sent


@pytest.mark.gpu
@pytest.mark.parametrize("way_name", ["gpu-torch", "gpu-triton"])
@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_blocks_go_to_a_gpu_and_back(layout, way_name, monkeypatch):
    host = allocate(make_way("cpu", monkeypatch), layout)
    device = allocate(make_way(way_name, monkeypatch), layout, num_blocks=9)
    sent, there = read_all(host), read_all(device)
    host.copy_to(device, [(0, 8), (3, 2)])
    there[8], there[2] = sent[0], sent[3]
    assert read_all(device) == there
    device.copy_to(host, [(7, 1), (6, 5)])
    sent[1], sent[5] = there[7], there[6]
    assert read_all(host) == sent


@pytest.mark.gpu
@pytest.mark.parametrize("way_name", ["gpu-torch", "gpu-triton"])
def test_copy_stream_is_ordered_with_the_engine_streams(way_name, monkeypatch):
    """The engine's stream is busy, then overwrites a source. The target still gets the old bytes."""
    import torch

    storage = allocate(make_way(way_name, monkeypatch), "L|BNHC", 6, block_size=16, num_layers=2)
    engine = torch.cuda.Stream()
    storage.use_copy_stream(engine)
    with torch.cuda.stream(engine):
        torch.cuda._sleep(100_000_000)
        for tensor in storage.tensors:
            tensor[4].fill_(3)
    storage.apply_moves([(4, 1)])
    with torch.cuda.stream(engine):
        for tensor in storage.tensors:
            tensor[4].fill_(5)
    torch.cuda.synchronize()
    for tensor in storage.tensors:
        assert (tensor[1] == 3).all()
        assert (tensor[4] == 5).all()


def test_copy_streams_are_refused_in_host_memory():
    with pytest.raises(InvalidArgumentError, match="in host memory"):
        BlockStorage.wrap_state([np.zeros((4, 4))]).use_copy_stream()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([np.zeros((6, 4)), np.zeros((5, 4))], r"one number of blocks and one device, not \[5, 6\]"),
        ([], "one number of blocks"),
        ([np.zeros((6, 4, 8))[:, :, ::2]], "the state of one block is not contiguous"),
        ([np.zeros((6, 4, 8))[:, :, :4]], "the state of one block is not contiguous"),
    ],
)
def test_state_that_cannot_be_moved_is_refused(tensors, said):
    with pytest.raises(InvalidArgumentError, match=said):
        BlockStorage.wrap_state(tensors)


def test_state_of_another_shape_has_another_format():
    one, other = (BlockStorage.wrap_state([np.zeros(shape, np.float32)]) for shape in [(6, 4, 2), (6, 2, 4)])
    assert one.block_format == "float32[4, 2]"
    with pytest.raises(InvalidArgumentError, match="the block formats differ"):
        one.copy_to(other, [(0, 0)])


def test_scratch_memory_is_at_most_32_mib_or_one_block():
    small = KVStorage.allocate(9, 4, 1, 1, 4)
    assert len(small.scratch_ids) == 9
    large = KVStorage.allocate(5, 16, 4, 8, 10_240, "float16")
    assert large.block_bytes == 20 * 2**20
    assert len(large.scratch_ids) == 1
    medium = KVStorage.allocate(9, 16, 4, 8, 5_120, "float16")
    assert len(medium.scratch_ids) == 3


def test_scratch_ids_are_not_block_ids():
    storage = KVStorage.allocate(4, 4, 1, 1, 4)
    [scratch_id, *_, last_id] = storage.scratch_ids
    assert scratch_id > np.iinfo(np.int32).max
    for wrong in (4, scratch_id - 1, last_id + 1, -1):
        with pytest.raises(InvalidBlockError, match=f"has block {wrong} as its target"):
            storage.apply_moves([(1, wrong)])
    with pytest.raises(InvalidBlockError):
        storage.read_block(scratch_id)
    with pytest.raises(InvalidBlockError):
        storage.copy_to(KVStorage.allocate(4, 4, 1, 1, 4), [(scratch_id, 1)])


def test_blocks_can_be_swapped_after_a_resize():
    storage = KVStorage.allocate(4, 4, 1, 1, 4)
    storage.write_block(1, b"a" * storage.block_bytes)
    storage.apply_moves([(1, 2), (2, 1)])
    storage.resize(8)
    storage.apply_moves([(2, 7), (7, 2)])
    assert storage.read_block(7) == b"a" * storage.block_bytes
    assert storage.read_block(2) == bytes(storage.block_bytes)
