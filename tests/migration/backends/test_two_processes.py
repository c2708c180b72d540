"""Backends with the source in another process, which is killed, suspended and resumed."""

import time

import numpy as np
import pytest
from migration.backends.made_links import BACKENDS, REMOTE_BACKENDS, TRANSFER_ID, make_connect, make_rows
from migration.backends.source_process import SourceProcess
from migration.made_channels import LONG, wait_until

from kv_pool.errors import PeerUnavailableError, TransferFailedError

NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 20
IDS = list(range(NUM_BLOCKS))


@pytest.fixture
def over_tcp(monkeypatch):
    """Make NIXL use TCP. Within a machine it would read a suspended process's memory normally."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def make_source(over_tcp):
    made = []

    def make(kind):
        made.append(SourceProcess(kind, NUM_BLOCKS, BLOCK_BYTES))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def make_target(over_tcp):
    made = []

    def make(kind, source):
        backend = BACKENDS[kind](make_rows(NUM_BLOCKS, [BLOCK_BYTES], 0, "x"))
        backend.attach(lambda *_: None, make_connect(lambda: source.address))
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


def get_bytes(backend):
    return backend.storage.segments.owners[0].reshape(NUM_BLOCKS, BLOCK_BYTES)


@pytest.mark.parametrize("kind", REMOTE_BACKENDS)
def test_blocks_of_another_process_arrive(kind, make_source, make_target):
    source = make_source(kind)
    target = make_target(kind, source)
    reader = target.open("source", source.description)
    count = reader.read(TRANSFER_ID, IDS, IDS[::-1], time.monotonic() + LONG)
    assert count.num_bytes == NUM_BLOCKS * BLOCK_BYTES
    assert (get_bytes(target)[::-1] == source.bytes).all()
    reader.close()
    assert reader.is_settled()


def test_a_backend_of_one_process_does_not_reach_another(make_source, make_target):
    source = make_source("in_process")
    target = make_target("in_process", source)
    with pytest.raises(PeerUnavailableError, match="not in this process"):
        target.open("source", source.description)


@pytest.mark.parametrize("kind", REMOTE_BACKENDS)
def test_a_killed_source_fails_the_read_and_others_work(kind, make_source, make_target):
    source = make_source(kind)
    target = make_target(kind, source)
    reader = target.open("source", source.description)
    source.kill()
    if kind == "tcp":
        wait_until(lambda: not reader.is_usable())
    for _ in range(2):
        with pytest.raises(TransferFailedError):
            reader.read(TRANSFER_ID, IDS, IDS, time.monotonic() + LONG)
    assert reader.is_settled()
    assert not reader.is_usable()
    reader.close()
    with pytest.raises(PeerUnavailableError, match=r"source|127\.0\.0\.1"):
        target.open("source", source.description)

    restarted = make_source(kind)
    source.address = restarted.address
    reader = target.open("source", restarted.description)
    reader.read(TRANSFER_ID, IDS, IDS, time.monotonic() + LONG)
    assert (get_bytes(target) == restarted.bytes).all()
    reader.close()


@pytest.mark.parametrize("kind", REMOTE_BACKENDS)
def test_a_stopped_source_fails_the_read_at_its_deadline(kind, make_source, make_target):
    source = make_source(kind)
    target = make_target(kind, source)
    reader = target.open("source", source.description)
    source.stop()
    with pytest.raises(TransferFailedError):
        reader.read(TRANSFER_ID, IDS, IDS, time.monotonic() + 0.3)
    is_settled = reader.is_settled()
    assert is_settled or kind == "nixl"
    reader.close()
    before = get_bytes(target).copy()
    source.wake()
    if is_settled:
        assert source.process.poll() is None
        assert (get_bytes(target) == before).all()
    else:  # an abandoned read continues, and is settled only after its bytes have arrived
        wait_until(reader.is_settled)
        assert (get_bytes(target) == source.bytes).all()


@pytest.mark.nixl
def test_a_nixl_read_is_settled_when_its_source_dies(make_source, make_target):
    source = make_source("nixl")
    target = make_target("nixl", source)
    reader = target.open("source", source.description)
    source.stop()
    with pytest.raises(TransferFailedError):
        reader.read(TRANSFER_ID, IDS, IDS, time.monotonic() + 0.3)
    assert not reader.is_settled()
    source.kill()
    wait_until(reader.is_settled)
    reader.close()
    before = get_bytes(target).copy()
    assert reader.is_settled()
    assert (get_bytes(target) == before).all()


def test_open_requires_the_secret(make_source, make_target):
    source = make_source("tcp")
    target = make_target("tcp", source)
    target.attach(lambda *_: None, make_connect(lambda: source.address, b"another secret it is"))
    with pytest.raises(PeerUnavailableError, match="secret"):
        target.open("source", source.description)
    assert np.count_nonzero(get_bytes(target)) == 0
