"""The documents, followed with `help()` alone: names, defaults, and errors that name the fix."""

import importlib
import pydoc
import re

import numpy as np
import pytest
from documents.made_examples import load_example

import kv_pool
from kv_pool import BlockAllocationRequest, GPUKVPool, InvalidArgumentError, PoolExhaustedError
from kv_pool.adapter import KVPoolMigrationManager
from kv_pool.integrations.sequence_allocator import KVCacheAllocator
from kv_pool.reports.allocation_monitor import AllocationMonitor

ROWS = re.findall(r"^    (kv_pool\.\S+) {2,}(.+)$", kv_pool.__doc__, re.MULTILINE)
NAMES = [
    *("GPUKVPool", "BlockAllocationRequest", "BlockInfo", "KVPoolProtocol", "AllocationResult"),
    *("MigrationResult", "KVPoolMigrationManager", "KVCacheAllocator", "SequencePageTable", "PagedAttention"),
    *("PagedTransformerLayer", "PagedInferenceEngine", "AdaptiveBlockManager", "SharedPrefixManager"),
    *("SystemConfigOptimizer", "AllocationMonitor"),
]
NEED_TORCH = ("attention", "transformers")
BlockSpaceManager = load_example("block_space_manager").BlockSpaceManager
SharedPrefixManager = load_example("shared_prefixes").SharedPrefixManager


def make_allocator(total_blocks=8, **options):
    return KVCacheAllocator(total_blocks, 4, num_heads=2, head_dim=4, **options)


def find_names(row):
    """Return the names that a row of the package's help lists for its module, functions included."""
    found = re.findall(r"\b(?:[A-Z]+[a-z]\w*[A-Z]\w*|paged_attention)\b", row)
    return [name for name in found if name != "GPU"]


def check_row(module_name, text):
    module = importlib.import_module(module_name)
    assert module.__doc__
    for name in find_names(text):
        assert getattr(module, name).__doc__, name


@pytest.mark.parametrize(
    ("module_name", "text"), [row for row in ROWS if row[0].rpartition(".")[2] not in NEED_TORCH]
)
def test_package_help_lists_modules_with_their_names(module_name, text):
    check_row(module_name, text)


@pytest.mark.torch
@pytest.mark.transformers
def test_package_help_lists_the_modules_that_need_torch():
    rows = [row for row in ROWS if row[0].rpartition(".")[2] in NEED_TORCH]
    assert len(rows) == len(NEED_TORCH)
    for row in rows:
        check_row(*row)


def test_package_help_contains_the_documents_names():
    """They used to be missing from `help(kv_pool)`."""
    text = pydoc.render_doc(kv_pool, renderer=pydoc.plaintext)
    for name in NAMES:
        assert re.search(rf"\b{name}\b", text), name
    assert "The result of an allocation request, from `GPUKVPool.try_allocate`" in " ".join(text.split())


# ---- the pool by ids -----------------------------------------------------------------------------


def test_the_error_for_block_size_0_names_block_size():
    """The error used to name hash_block_size, which the caller had not passed."""
    for make in (
        lambda: GPUKVPool(10, 0),
        lambda: BlockSpaceManager(0, 4, 0),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^block_size is 0; a block has at least 1 token$"):
            make()


def test_migrating_without_storage_explains_the_fix():
    here, there = GPUKVPool(10, 16), GPUKVPool(10, 16, device_id=1)
    here.connect(there)
    ids = here.allocate(BlockAllocationRequest(num_blocks=2, sequence_id=1))
    for migrate in (
        lambda: here.migrate_blocks(ids, 1),
        lambda: KVPoolMigrationManager(here).migrate_to_remote(1, 1),
    ):
        with pytest.raises(
            InvalidArgumentError,
            match=r"device 0 has no storage, .*; create it with storage=, .*KVStorage\.allo",
        ):
            migrate()


# ---- sequences by id -----------------------------------------------------------------------------


def test_an_allocator_has_the_articles_attributes():
    allocator = make_allocator()
    table = allocator.allocate_sequence(1, 9)
    assert (allocator.num_heads, allocator.head_dim, allocator.block_size) == (2, 4, 4)
    assert table.block_offsets == [0, 4, 8]
    for index, offset in enumerate(table.block_offsets):
        assert table.get_physical_location(offset) == (table.blocks[index], 0)


@pytest.mark.parametrize("name", ["total_blocks", "block_size", "num_heads", "head_dim", "num_layers"])
def test_a_size_below_1_is_refused_by_its_name(name):
    """The error used to name the axes of the storage: {'B': 0, 'N': 4, 'L': 1, ...}."""
    sizes = {"total_blocks": 8, "block_size": 4, "num_heads": 2, "head_dim": 4, "num_layers": 1}
    with pytest.raises(InvalidArgumentError, match=f"{name} is 0; it is a count, 1 or more"):
        KVCacheAllocator(**{**sizes, name: 0})


def test_too_little_memory_names_the_bytes_per_block():
    """The error used to include a null block, which the allocator does not have."""
    with pytest.raises(
        InvalidArgumentError, match="1,000 bytes are too few for a block of 4 tokens, which takes 4,096"
    ):
        KVCacheAllocator.count_blocks(1000, 4, num_layers=2, num_heads=4, head_dim=32)
    assert KVCacheAllocator.count_blocks(4096, 4, num_layers=2, num_heads=4, head_dim=32) == 1


def test_a_monitor_takes_an_allocator():
    allocator = make_allocator()
    monitor = AllocationMonitor(allocator, clock=lambda: 5.0)
    for sequence_id in range(4):
        allocator.allocate_sequence(sequence_id, 5)
    for sequence_id in (0, 2):
        allocator.free_sequence(sequence_id)
    monitor.log_allocation_state()
    state = monitor.history[-1]
    assert (state.timestamp, state.active_sequences) == (5.0, 2)
    assert (
        (state.free_blocks, state.used_blocks)
        == (len(allocator.free_blocks), len(allocator.used_blocks))
        == (4, 4)
    )
    assert state.utilization == 0.5
    assert monitor.calculate_fragmentation() == state.fragmentation_rate == 1.0
    for sequence_id in (1, 3):
        allocator.free_sequence(sequence_id)
    assert monitor.calculate_fragmentation() == 0.0


# ---- shared prefixes -----------------------------------------------------------------------------


def test_a_prefix_is_computed_once_and_shared_until_a_write():
    """In the article blocks are counted twice, and a growing sequence writes to the shared last block."""
    allocator = make_allocator(total_blocks=8, dtype="float32")
    computed = []

    def write(sequence_id, position, numbers):
        key = np.repeat(np.array(numbers, np.float32), 8).reshape(-1, 2, 4)
        allocator.write(0, sequence_id, position, key, key)

    def compute(sequence_id, tokens):
        computed.append(list(tokens))
        write(sequence_id, 0, tokens)

    prefixes = SharedPrefixManager(allocator, compute)
    prefix = prefixes.create_shared_prefix([10, 11, 12, 13, 14])
    assert prefixes.create_shared_prefix((10, 11, 12, 13, 14)) == prefix
    assert computed == [[10, 11, 12, 13, 14]]
    for sequence_id in (0, 1):
        assert prefixes.fork_sequence(prefix, sequence_id).blocks == prefixes.prefix_blocks[prefix]
        allocator.extend_sequence(sequence_id, 1)
        write(sequence_id, 5, [20 + sequence_id])
    for sequence_id in (0, 1):
        key, _ = allocator.read(0, sequence_id, 6)
        assert key[:, 0, 0].tolist() == [10, 11, 12, 13, 14, 20 + sequence_id]
    assert len(allocator.used_blocks) == 2 + 1 + 1
    prefixes.free_shared_prefix(prefix)
    assert allocator.read(0, 1, 6)[0][:, 1, 3].tolist() == [10, 11, 12, 13, 14, 21]
    for sequence_id in (0, 1):
        allocator.free_sequence(sequence_id)
    assert (len(allocator.free_blocks), prefixes.prefix_blocks) == (8, {})


def test_each_prefix_has_its_own_sequence_id_and_name():
    allocator = make_allocator()
    allocator.allocate_sequence(-1, 4)
    prefixes = SharedPrefixManager(allocator)
    first, second = (prefixes.create_shared_prefix([token, 2]) for token in (1, 3))
    assert first != second
    assert sorted(allocator.sequence_tables) == [-3, -2, -1]
    prefixes.free_shared_prefix(first)
    for call in (prefixes.free_shared_prefix, lambda name: prefixes.fork_sequence(name, 5)):
        with pytest.raises(
            ValueError, match=r"there is no prefix .*; pass a name that create_shared_prefix\(\) returned"
        ):
            call(first)
    with pytest.raises(InvalidArgumentError, match="prompt_tokens is empty"):
        prefixes.create_shared_prefix([])
    with pytest.raises(PoolExhaustedError):
        prefixes.create_shared_prefix(range(40))
    assert list(prefixes.prefix_blocks) == [second]


def test_a_prefix_whose_computation_fails_is_not_kept():
    allocator = make_allocator()

    def fail(sequence_id, tokens):
        raise RuntimeError("no model")

    prefixes = SharedPrefixManager(allocator, fail)
    with pytest.raises(RuntimeError, match="no model"):
        prefixes.create_shared_prefix([1, 2, 3])
    assert (prefixes.prefix_blocks, len(allocator.free_blocks), dict(allocator.sequence_tables)) == (
        {},
        8,
        {},
    )


# ---- layer and engine ----------------------------------------------------------------------------

CONFIG = {"n_layers": 2, "d_model": 16, "n_heads": 4, "head_dim": 4}


@pytest.mark.torch
def test_an_engine_accepts_prompts_of_any_float_type():
    """`torch.randn` is float32, the engine's default is float16, and torch refused to mix them."""
    import torch

    engine_class = load_example("paged_transformer").PagedInferenceEngine

    engine = engine_class(CONFIG, gpu_memory_gb=1e-4)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        sequence_id = engine.create_sequence(torch.randn(5, 16, dtype=dtype))
        assert engine.generate_token(sequence_id).dtype == torch.float16
    with pytest.raises(
        InvalidArgumentError, match=r"the prompt has shape \(5, 8\); it must be \(num_tokens, d_model\)"
    ):
        engine.create_sequence(torch.randn(5, 8))
    assert len(engine.allocator.sequence_tables) == 3


@pytest.mark.torch
@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"n_layers": 2}, {}, "model_config lacks d_model, head_dim, n_heads"),
        (
            {**CONFIG, "head_dim": 8},
            {},
            "n_heads is 4 and head_dim 8; d_model must be 32, not 16",
        ),
        (CONFIG, {"dtype": "f16"}, "dtype is 'f16'; it is float16, bfloat16, float32 or float64"),
        (CONFIG, {"dtype": "int8"}, "dtype is 'int8'"),
        (CONFIG, {"gpu_memory_gb": 1e-9}, "are too few for a block of 16 tokens"),
    ],
)
def test_invalid_engine_settings_are_refused(config, options, message):
    engine_class = load_example("paged_transformer").PagedInferenceEngine

    with pytest.raises(InvalidArgumentError, match=message):
        engine_class(config, **{"gpu_memory_gb": 1e-4, **options})


@pytest.mark.torch
def test_a_layer_works_with_an_allocator_of_numpy_arrays():
    """By default the allocator stores NumPy arrays, and attention failed on them."""
    import torch

    layer_class = load_example("paged_transformer").PagedTransformerLayer

    outputs = []
    for library in (None, "torch"):
        allocator = KVCacheAllocator(8, 4, num_heads=4, head_dim=4, dtype="float32", library=library)
        allocator.allocate_sequence(0)
        torch.manual_seed(0)
        layer = layer_class(16, 4, allocator)
        with torch.no_grad():
            outputs.append([layer(torch.ones(1, 16) * position, 0, position) for position in range(6)])
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)
