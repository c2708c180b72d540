import numpy as np
import pytest
import xxhash
from storage.made_storage import BLOCK_AXES, WAYS_TO_COPY, allocate, make_way

from kv_pool.errors import InvalidBlockError
from kv_pool.storage import checksums
from kv_pool.storage.checksums import checksum_blocks


@pytest.fixture(params=WAYS_TO_COPY)
def way(request, monkeypatch):
    return make_way(request.param, monkeypatch)


@pytest.mark.parametrize("layout", BLOCK_AXES)
def test_a_checksum_is_the_xxh3_64_of_the_bytes(layout, way):
    storage = allocate(way, layout)
    ids = [6, 0, 3, 4, 3]
    expected = [xxhash.xxh3_64_intdigest(storage.read_block(block_id)) for block_id in ids]
    got = checksum_blocks(storage, ids)
    assert got.dtype == np.uint64
    assert got.tolist() == expected
    assert checksum_blocks(storage, np.array(ids)).tolist() == expected
    assert checksum_blocks(storage, []).tolist() == []


def test_blocks_of_a_gpu_pass_through_a_small_buffer(way, monkeypatch):
    storage = allocate(way, "L|BNHC")
    expected = checksum_blocks(storage, range(7)).tolist()
    for blocks in (1, 2, 7):
        monkeypatch.setattr(checksums, "_BUFFER_BYTES", blocks * storage.block_bytes)
        assert checksum_blocks(storage, range(7)).tolist() == expected


@pytest.mark.parametrize("block_id", [-1, 7])
def test_unknown_block_ids_are_refused(block_id, way):
    with pytest.raises(InvalidBlockError, match="0 to 6"):
        checksum_blocks(allocate(way, "L|BNHC"), [1, block_id])
