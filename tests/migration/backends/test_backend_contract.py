"""The contract of all backends (`transfer_backend.py`); test_two_processes.py tests it across processes."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from migration.backends.made_links import (
    ALL_BACKENDS,
    LAYOUT_PAIRS,
    SERVING_BACKENDS,
    TRANSFER_ID,
    fill,
    get_memories,
    make_kv,
    make_link,
    make_rows,
    read_all,
)
from migration.made_channels import soon

from kv_pool.errors import (
    InvalidBlockError,
    MigrationError,
    PeerUnavailableError,
    StaleTransferError,
    TransferFailedError,
)

__all__ = ["make_link"]


def check_read(link, reader, remote_ids, local_ids):
    """Read, and compare every block of the target with its expected content."""
    expected = read_all(link.target)
    for remote_id, local_id in zip(remote_ids, local_ids, strict=True):
        expected[local_id] = link.source.read_block(remote_id)
    count = reader.read(TRANSFER_ID, remote_ids, local_ids, soon())
    assert read_all(link.target) == expected
    assert count.num_bytes == len(remote_ids) * link.source.block_bytes
    assert (count.num_descriptors > 0) == (len(remote_ids) > 0)


@pytest.mark.parametrize("pair", LAYOUT_PAIRS)
@pytest.mark.parametrize("kind", ALL_BACKENDS)
def test_blocks_arrive_in_every_memory_layout(kind, pair, make_link):
    link = make_link(kind, *LAYOUT_PAIRS[pair](12, 15))
    fill(link.source, 1)
    fill(link.target, 2)
    reader = link.open()
    check_read(link, reader, [], [])
    check_read(link, reader, [2, 3, 4, 9, 10], [5, 6, 7, 8, 1])
    check_read(link, reader, list(range(12)), list(range(2, 14)))
    rng = random.Random(pair)
    for _ in range(3 if "few blocks" in pair else 10):
        count = rng.randrange(13)
        check_read(link, reader, rng.sample(range(12), count), rng.sample(range(15), count))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "devices", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")], ids=" to ".join
)
@pytest.mark.parametrize("kind", SERVING_BACKENDS)
def test_blocks_of_a_gpu_arrive(kind, devices, make_link):
    rng = random.Random(0)
    link = make_link(kind, make_kv("NHD", 12, devices[0]), make_kv("BLNHC", 15, devices[1]))
    for block_id in range(12):
        link.source.write_block(block_id, rng.randbytes(link.source.block_bytes))
    reader = link.open()
    check_read(link, reader, [2, 3, 4, 9, 10], [5, 6, 7, 8, 1])
    check_read(link, reader, list(range(12)), list(range(2, 14)))


@pytest.mark.parametrize("kind", ALL_BACKENDS)
def test_padding_between_blocks_is_unchanged(kind, make_link):
    link = make_link(kind, make_rows(8, [128], 64, "x"), make_rows(8, [128], 32, "x"))
    fill(link.source, 1)
    fill(link.target, 2)
    (memory,) = get_memories(link.target)
    before = memory.reshape(8, 160)[:, 128:].copy()
    link.open().read(TRANSFER_ID, list(range(8)), list(range(8)), soon())
    assert (memory.reshape(8, 160)[:, 128:] == before).all()


@pytest.mark.parametrize("kind", ALL_BACKENDS)
def test_blocks_contiguous_on_both_sides_are_one_piece(kind, make_link):
    link = make_link(kind, make_kv("BLNHC", 16), make_kv("BLNHC", 16))
    reader = link.open()
    in_a_run = reader.read(TRANSFER_ID, list(range(8)), list(range(4, 12)), soon())
    scattered = reader.read(TRANSFER_ID, list(range(0, 16, 2)), list(range(8)), soon())
    assert (in_a_run.num_descriptors, scattered.num_descriptors) == (1, 8)


@pytest.mark.parametrize("kind", ALL_BACKENDS)
def test_late_wrong_and_closed_reads_are_refused(kind, make_link):
    link = make_link(kind, make_kv("NHD", 9), make_kv("NHD", 8))
    with pytest.raises(PeerUnavailableError, match="stranger"):
        link.target_backend.open("stranger", b"not a description")
    late = link.open()
    with pytest.raises(TransferFailedError):
        late.read(TRANSFER_ID, [1, 2], [3, 4], time.monotonic() - 1)
    assert late.is_settled()
    reader = link.open()
    with pytest.raises(InvalidBlockError, match="block 8 is not one of 0 to 7"):
        reader.read(TRANSFER_ID, [1, 2], [3, 8], soon())
    check_read(link, reader, [1], [3])
    assert reader.is_usable()
    reader.close()
    reader.close()
    assert reader.is_settled()
    assert not reader.is_usable()
    with pytest.raises(TransferFailedError):
        reader.read(TRANSFER_ID, [1], [1], soon())


@pytest.mark.parametrize("kind", ALL_BACKENDS)
def test_readers_of_several_threads_are_independent(kind, make_link):
    num_readers, each = 4, 16
    link = make_link(kind, make_kv("NHD", num_readers * each), make_kv("BLNHC", num_readers * each))
    fill(link.source, 3)
    readers = [link.open() for _ in range(num_readers)]

    def read(number):
        ids = list(range(number * each, (number + 1) * each))
        for _ in range(20):
            readers[number].read(TRANSFER_ID, ids, ids[::-1], soon())

    with ThreadPoolExecutor(num_readers) as executor:
        list(executor.map(read, range(num_readers)))
    expected = read_all(link.source)
    got = read_all(link.target)
    for first in range(0, num_readers * each, each):
        assert got[first : first + each] == expected[first : first + each][::-1]


@pytest.mark.parametrize("kind", SERVING_BACKENDS)
def test_blocks_that_are_not_leased_are_not_read(kind, make_link):
    link = make_link(kind, make_kv("NHD", 8), make_kv("NHD", 8))
    fill(link.source, 1)

    def check_leased(transfer_id, block_ids):
        if not set(block_ids) <= {1, 2}:
            raise StaleTransferError(f"{block_ids} are not leased")

    link.check_leased = check_leased
    reader = link.open()
    before = read_all(link.target)
    with pytest.raises(StaleTransferError, match="not leased"):
        reader.read(TRANSFER_ID, [1, 3], [4, 5], soon())
    assert read_all(link.target) == before
    assert reader.is_settled()
    check_read(link, reader if reader.is_usable() else link.open(), [1, 2], [4, 5])


@pytest.mark.parametrize("kind", SERVING_BACKENDS)
def test_a_lease_that_ends_during_the_send_fails_the_read(kind, make_link):
    link = make_link(kind, make_kv("NHD", 8), make_kv("NHD", 8))

    def check_leased(transfer_id, block_ids):
        if len(link.asked) > 1:
            raise StaleTransferError("it ended meanwhile")

    link.check_leased = check_leased
    with pytest.raises(StaleTransferError, match="meanwhile"):
        link.open().read(TRANSFER_ID, [1, 3], [4, 5], soon())
    assert link.asked == [(TRANSFER_ID, [1, 3])] * 2


@pytest.mark.parametrize("kind", SERVING_BACKENDS)
def test_a_long_read_checks_the_lease_repeatedly(kind, make_link):
    link = make_link(kind, make_rows(24, [6 << 20], 0, "x"), make_rows(24, [6 << 20], 0, "x"))
    link.open().read(TRANSFER_ID, list(range(24)), list(range(24)), soon())
    named = [block_id for _, block_ids in link.asked for block_id in block_ids]
    assert sorted(named) == sorted(list(range(24)) * 2)
    assert max(len(block_ids) for _, block_ids in link.asked) < 24


@pytest.mark.parametrize("kind", SERVING_BACKENDS)
def test_closed_and_unattached_backends_serve_nothing(kind, make_link):
    link = make_link(kind, make_kv("NHD", 8), make_kv("NHD", 8))
    reader, other = link.open(), link.open()
    link.source_backend.check_leased = type(link.source_backend)(link.source).check_leased
    with pytest.raises(StaleTransferError, match="not attached to a node"):
        other.read(TRANSFER_ID, [1], [1], soon())
    link.source_backend.check_leased = link._check_leased
    link.source_backend.close()
    with pytest.raises(MigrationError):
        reader.read(TRANSFER_ID, [1], [1], soon())
    assert reader.is_settled()
