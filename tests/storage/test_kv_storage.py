import numpy as np
import pytest

from kv_pool import InvalidArgumentError, InvalidBlockError, InvalidTypeError
from kv_pool.storage import KVStorage

HEADS, HEAD_SIZE = 3, 8


def make(layout="NHD", num_blocks=6, dtype="float16", **others):
    heads = 1 if layout in ("MLA", "L|BND") else HEADS
    return KVStorage.allocate(num_blocks, 4, 2, heads, HEAD_SIZE, dtype, layout=layout, **others)


def draw(num_tokens, heads=HEADS, seed=0, dtype=np.float16):
    return np.random.default_rng(seed).standard_normal((num_tokens, heads, HEAD_SIZE)).astype(dtype)


def test_writes_show_in_the_engine_tensors():
    """In vLLM's shape (B, N, H, 2D), K and V of a head are adjacent."""
    storage = make("NHD")
    key, value = draw(1, seed=1), draw(1, seed=2)
    storage.write(1, [9], key, value)
    seen = storage.tensors[1][2, 1]
    np.testing.assert_array_equal(seen, np.concatenate([key[0], value[0]], axis=1))


def test_a_wrapped_cache_is_read_in_place():
    """SGLang's layout: keys of all layers, then values, (tokens, heads, head size)."""
    pools = [np.zeros((24, HEADS, HEAD_SIZE), np.float32) for _ in range(4)]
    storage = KVStorage.wrap(pools, "SGLANG", block_size=4)
    assert (storage.num_blocks, storage.num_layers, storage.block_size) == (6, 2, 4)
    pools[1][5], pools[3][5] = 7, 8
    key, value = storage.read(1, [5])
    assert (key == 7).all()
    assert (value == 8).all()


def test_a_composite_axis_is_split_by_the_given_sizes():
    """TensorRT-LLM's pool, (blocks, layers, 2, heads * tokens * head size)."""
    pool = np.zeros((6, 2, 2, HEADS * 4 * HEAD_SIZE), np.float16)
    storage = KVStorage.wrap(pool, "TRTLLM", block_size=4, head_size=HEAD_SIZE)
    assert storage.num_kv_heads == HEADS
    storage.write(1, [6], draw(1), draw(1, seed=1))
    np.testing.assert_array_equal(pool[1, 1, 0].reshape(HEADS, 4, HEAD_SIZE)[:, 2], draw(1)[0])


@pytest.mark.parametrize(
    ("tensors", "layout", "sizes", "said"),
    [
        ([np.zeros((6, 4, 3))], "NHD", {}, "has 3 axes, layout"),
        ([np.zeros((6, 4, 3, 7))], "NHD", {}, "axis C .* has size 7, which is not 2=2 x D="),
        ([np.zeros((6, 4, 3, 16))], "NHD", {"block_size": 5}, "axis N .* has size 4, which is not N=5"),
        ([np.zeros((24, 3, 8))] * 2, "SGLANG", {}, "pass the size of B or N"),
        ([np.zeros((24, 3, 8))] * 3, "SGLANG", {"block_size": 4}, "axis 2L .* has size 3"),
        ([np.zeros((6, 4, 3, 16)), np.zeros((5, 4, 3, 16))], "NHD", {}, "must be alike"),
        ([np.zeros((6, 4, 3, 32))[..., ::2]], "NHD", {}, "are not contiguous"),
        ([np.broadcast_to(np.zeros((1, 4, 3, 16)), (6, 4, 3, 16))], "NHD", {}, "between blocks is 0 bytes"),
        ([np.zeros((6, 4, 3, 16))[::-1]], "NHD", {}, "the stride between blocks is -1536 bytes"),
        ([np.zeros((6, 4, 3, 16))], "NHD", {"dtype": "bfloat16"}, "float64 and bfloat16 differ in size"),
        ([np.zeros((6, 4, 3, 16), complex)], "NHD", {}, "unknown dtype 'complex128'"),
        ([], "NHD", {}, "no tensors"),
        ([np.zeros((1, 6, 2, 3, 4, 8))] * 2, "|BL2F", {}, "has 6 axes"),
    ],
)
def test_tensors_that_do_not_fit_the_layout_are_refused(tensors, layout, sizes, said):
    with pytest.raises(InvalidArgumentError, match=said):
        KVStorage.wrap(tensors, layout, **sizes)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_blocks": 0}, "every size must be at least 1"),
        ({"head_size": -1}, "every size must be at least 1"),
        ({"dtype": "float12"}, "unknown dtype 'float12'; known are float64"),
        ({"layout": "MLA"}, "has no heads, so num_kv_heads must be 1, not 3"),
        ({"device": "cuda", "library": "numpy"}, "NumPy arrays are on the CPU, not on cuda"),
    ],
)
def test_invalid_sizes_are_refused(sizes, said):
    with pytest.raises(InvalidArgumentError, match=said):
        KVStorage.allocate(
            **{"num_blocks": 6, "block_size": 4, "num_layers": 2, "num_kv_heads": 3, "head_size": 8, **sizes}
        )


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((2, [0], draw(1), draw(1)), InvalidArgumentError, "layer 2 is not one of 0 to 1"),
        ((-1, [0], draw(1), draw(1)), InvalidArgumentError, "layer -1"),
        ((0, [24], draw(1), draw(1)), InvalidBlockError, "slot 24 is not one of 0 to 23"),
        ((0, [3, -1], draw(2), draw(2)), InvalidBlockError, "slot -1"),
        ((0, [0.5], draw(1), draw(1)), InvalidTypeError, "slots must be integers, not float64"),
        ((0, [[0]], draw(1), draw(1)), InvalidArgumentError, "slots must have one axis"),
        (
            (0, [0], draw(2), draw(2)),
            InvalidArgumentError,
            r"key has shape \(2, 3, 8\); 1 slots need \(1, 3, 8\)",
        ),
        ((0, [0], draw(1), None), InvalidArgumentError, "value has shape None"),
        (
            (0, [0], draw(1), draw(1, dtype=np.float32)),
            InvalidTypeError,
            "value has dtype float32; this storage",
        ),
    ],
)
def test_a_refused_write_writes_nothing(arguments, error, said):
    storage = make()
    with pytest.raises(error, match=said):
        storage.write(*arguments)
    assert not any(tensor.any() for tensor in storage.tensors)


def test_a_latent_cache_rejects_values():
    with pytest.raises(InvalidArgumentError, match="a latent cache has no values"):
        make("MLA").write(0, [0], draw(1, heads=1), draw(1, heads=1))


def test_types_unknown_to_numpy_are_stored_as_bits():
    storage = make(dtype="bfloat16")
    bits = np.arange(HEADS * HEAD_SIZE, dtype=np.uint16).reshape(1, HEADS, HEAD_SIZE)
    storage.write(0, [3], bits, bits + 1)
    key, value = storage.read(0, [3])
    np.testing.assert_array_equal(key, bits)
    np.testing.assert_array_equal(value, bits + 1)


def test_bytes_of_the_wrong_length_are_refused():
    storage = make()
    with pytest.raises(InvalidArgumentError, match="data has 5 bytes; a block has 768"):
        storage.write_block(0, b"12345")
    for block_id in (-1, 6):
        with pytest.raises(InvalidBlockError, match=f"block {block_id} is not one of 0 to 5"):
            storage.read_block(block_id)
        with pytest.raises(InvalidBlockError, match=f"block {block_id} is not one of 0 to 5"):
            storage.write_block(block_id, bytes(storage.block_bytes))


def test_blocks_with_another_byte_order_are_not_copied():
    with pytest.raises(InvalidArgumentError, match="N=4 H=3 2=2 D=8 here, float16 L=2 H=3"):
        make("NHD").copy_to(make("HND"), [(0, 0)])
    with pytest.raises(InvalidArgumentError, match="the block formats differ: float16"):
        make().copy_to(make(dtype="bfloat16"), [(0, 0)])


@pytest.mark.torch
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "uint8"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "FLASH", "SGLANG", "TRTLLM"])
def test_torch_tensors_are_written_and_read(layout, dtype, device):
    import torch

    storage = make(layout, dtype=dtype, device=device, library="torch")
    key = torch.from_numpy(draw(3, dtype=np.float32)).abs().to(device, getattr(torch, dtype))
    storage.write(1, torch.tensor([3, 17, 5], device=device), key, key.flip(0))
    read_key, read_value = storage.read(1, torch.tensor([17, 3], dtype=torch.int32))
    assert read_key.dtype == getattr(torch, dtype)
    assert torch.equal(read_key.view(torch.uint8), key.view(torch.uint8)[[1, 0]])
    assert torch.equal(read_value.view(torch.uint8), key.flip(0).view(torch.uint8)[[1, 0]])


@pytest.mark.torch
def test_a_numpy_storage_accepts_torch_tensors():
    import torch

    storage = make(dtype="bfloat16")
    key = torch.arange(HEADS * HEAD_SIZE, dtype=torch.bfloat16).reshape(1, HEADS, HEAD_SIZE)
    storage.write(0, torch.tensor([3]), key, key.requires_grad_())
    np.testing.assert_array_equal(
        storage.read(0, [3])[1], key.detach().view(torch.int16).numpy().view(np.uint16)
    )
    with pytest.raises(InvalidTypeError, match="key has dtype float32; this storage has bfloat16"):
        storage.write(0, [3], key.float(), key)


@pytest.mark.torch
def test_engine_tensors_are_wrapped_in_place():
    import torch

    layers = [torch.zeros(2, 6, 4, HEADS, HEAD_SIZE, dtype=torch.bfloat16) for _ in range(2)]
    storage = KVStorage.wrap(layers, "FLASH")
    layers[1][1, 2, 3] = 5
    assert (storage.read(1, [11])[1] == 5).all()
    storage.apply_moves([(2, 0)])
    assert (layers[1][1, 0, 3] == 5).all()
