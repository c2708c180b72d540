"""The records and the abstract class for KV managers."""

from dataclasses import fields
from inspect import signature

import pytest

from kv_pool import (
    AllocationResult,
    BlockAllocationRequest,
    BlockInfo,
    GPUKVPool,
    KVPoolProtocol,
    MigrationResult,
)

FIELDS = {
    BlockAllocationRequest: ["num_blocks", "sequence_id", "priority", "pinned", "device_id"],
    BlockInfo: ["block_id", "ref_count", "sequence_id", "device_id", "is_pinned", "last_access_time"],
    AllocationResult: [
        "success",
        "block_ids",
        "allocated_memory",
        "allocation_time",
        "fragmentation_rate",
    ],
    MigrationResult: ["success", "migrated_blocks", "migration_time", "transferred_bytes"],
}
METHODS = {
    "allocate": ["request"],
    "free": ["block_ids"],
    "get_block_info": ["block_id"],
    "defragment": [],
    "migrate_blocks": ["block_ids", "target_device_id"],
    "get_free_blocks": [],
    "get_fragmentation_rate": [],
}


@pytest.mark.parametrize("record", FIELDS, ids=lambda record: record.__name__)
def test_records_begin_with_the_protocol_fields(record):
    names = [field.name for field in fields(record)]
    assert names[: len(FIELDS[record])] == FIELDS[record]


def test_allocation_request_needs_only_count_and_sequence():
    request = BlockAllocationRequest(10, 1)
    assert (request.priority, request.pinned, request.device_id) == (0, False, None)
    assert (request.contiguous, request.max_moves) == ("prefer", None)


@pytest.mark.parametrize("name", METHODS)
def test_protocol_and_pool_take_the_same_arguments(name):
    for owner in (KVPoolProtocol, GPUKVPool):
        parameters = list(signature(getattr(owner, name)).parameters)[1:]
        assert parameters[: len(METHODS[name])] == METHODS[name]


def test_the_protocol_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        KVPoolProtocol()
    assert KVPoolProtocol.__abstractmethods__ == frozenset(METHODS)
    assert isinstance(GPUKVPool(4, 16), KVPoolProtocol)
