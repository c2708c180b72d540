"""The article's advice on sizes: by access pattern, by model and workload.

If its code would be wrong, the test says what the package does instead, and why.
"""

import random

import pytest
from documents.made_examples import load_example

from kv_pool import BlockAllocationRequest, GPUKVPool, InvalidArgumentError, InvalidTypeError
from kv_pool.lab.capacity import ModelKV

AdaptiveBlockManager = load_example("recommended_sizes").AdaptiveBlockManager
SystemConfigOptimizer = load_example("recommended_sizes").SystemConfigOptimizer

# ---- block size by access pattern ----------------------------------------------------------------


def make_pattern(num_near, num_far):
    """Return positions with the given numbers of steps within 16 of the previous one, and of longer steps."""
    positions = [0]
    for number in range(num_near + num_far):
        positions.append(positions[-1] + (16 if number < num_near else 17))
    return positions


@pytest.mark.parametrize(
    ("num_near", "num_far", "block_size"),
    [(10, 0, 64), (9, 1, 64), (8, 2, 32), (6, 4, 32), (5, 5, 8), (0, 10, 8)],
)
def test_nearer_reads_give_larger_blocks(num_near, num_far, block_size):
    manager = AdaptiveBlockManager(min_block_size=8, max_block_size=64)
    manager.profile_sequence(3, make_pattern(num_near, num_far))
    assert manager.get_optimal_block_size(3) == block_size


def test_a_sequence_without_a_profile_has_blocks_of_16_tokens():
    """In the article a pattern of one position makes a profile of locality 0 and so the smallest blocks. One
    position has no locality, so here it makes no profile.
    """
    manager = AdaptiveBlockManager()
    for pattern in ([], [7]):
        manager.profile_sequence(1, pattern)
        assert manager.get_optimal_block_size(1) == 16
    manager.profile_sequence(1, range(100))
    assert manager.get_optimal_block_size(1) == 64
    manager.profile_sequence(1, [0, 1000, 0])
    manager.profile_sequence(1, [5])
    assert manager.get_optimal_block_size(1) == 8
    manager.forget_sequence(1)
    manager.forget_sequence(1)
    assert manager.get_optimal_block_size(1) == 16


@pytest.mark.parametrize(("smallest", "largest"), [(8, 16), (64, 128), (4, 4)])
def test_every_recommendation_is_within_the_bounds(smallest, largest):
    """The article recommends 32 or 16 regardless of the bounds."""
    rng = random.Random(smallest)
    manager = AdaptiveBlockManager(smallest, largest)
    for sequence_id in range(50):
        near = rng.randint(0, 10)
        manager.profile_sequence(sequence_id, make_pattern(near, 10 - near))
    answers = {manager.get_optimal_block_size(sequence_id) for sequence_id in range(51)}
    assert {smallest, largest} <= answers
    assert all(smallest <= answer <= largest for answer in answers)


def test_each_block_size_has_a_pool_for_its_sequences():
    manager = AdaptiveBlockManager(8, 32)
    pools = {block_size: GPUKVPool(64, block_size) for block_size in (8, 16, 32)}
    patterns = {1: range(200), 2: [0, 150, 10, 190], 3: []}
    for sequence_id, pattern in patterns.items():
        manager.profile_sequence(sequence_id, pattern)
        pool = pools[manager.get_optimal_block_size(sequence_id)]
        num_blocks = -(-200 // pool.block_size)
        pool.allocate(BlockAllocationRequest(num_blocks=num_blocks, sequence_id=sequence_id))
    assert {size: pool.list_sequences() for size, pool in pools.items()} == {8: [2], 16: [3], 32: [1]}
    assert [len(pools[size].block_info) for size in (8, 16, 32)] == [25, 13, 7]


@pytest.mark.parametrize(("smallest", "largest"), [(0, 8), (16, 8), (-1, -1)])
def test_invalid_bounds_are_refused(smallest, largest):
    with pytest.raises(
        InvalidArgumentError, match=f"min_block_size is {smallest} and max_block_size {largest}"
    ):
        AdaptiveBlockManager(smallest, largest)


def test_non_integers_are_refused():
    manager = AdaptiveBlockManager()
    for call in (
        lambda: AdaptiveBlockManager(max_block_size="64"),
        lambda: manager.profile_sequence("1", [1, 2]),
        lambda: manager.profile_sequence(1, [1, "2"]),
        lambda: manager.get_optimal_block_size(None),
    ):
        with pytest.raises(InvalidTypeError):
            call()
    assert manager.get_optimal_block_size(1) == 16


# ---- sizes by model and workload------------------------------------------------------------------


@pytest.mark.parametrize(("workload_type", "block_size"), [("chat", 16), ("code", 8), ("long-doc", 32)])
@pytest.mark.parametrize(("model_size", "gpu_memory", "layers"), [("7B", 16, 32), ("13B", 24, 40)])
def test_a_recommended_pool_fits_beside_the_weights(
    model_size, gpu_memory, layers, workload_type, block_size
):
    """Block sizes and memory are the article's. Its numbers of blocks fill all of the memory and leave none
    for the weights; here blocks get the memory that the weights leave. Those of 13B fit into 24 GiB with 8
    bits only.
    """
    config = SystemConfigOptimizer.recommend_config(model_size, workload_type)
    assert (config["block_size"], config["gpu_memory"]) == (block_size, gpu_memory)
    block_bytes = ModelKV(layers, layers, 128).count_block_bytes(block_size)
    weights = int(model_size[:-1]) * 1e9 * config["weight_bits"] / 8
    taken = weights + config["total_blocks"] * block_bytes
    assert taken <= 0.9 * gpu_memory * 2**30 < taken + block_bytes
    pool = GPUKVPool(config["total_blocks"], config["block_size"])
    assert pool.get_free_blocks() == config["total_blocks"]


def test_unknown_names_are_refused():
    """The article returns {} for unknown names, which a caller notices only later."""
    recommend = SystemConfigOptimizer.recommend_config
    for model_size, workload_type in (("70B", "chat"), ("7B", "poetry")):
        with pytest.raises(
            InvalidArgumentError,
            match="model_size is one of 7B, 13B, workload_type one of chat, code, long-doc",
        ):
            recommend(model_size, workload_type)
