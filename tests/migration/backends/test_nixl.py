"""Tests of `NixlBackend` only; the contract test has the rest."""

import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
from made_threads import no_new_threads
from migration.backends.made_links import LAYOUT_PAIRS, make_kv, make_rows

from kv_pool.errors import MissingDependencyError, OutOfThreadsError, PeerUnavailableError
from kv_pool.migration.backends.nixl import (
    NixlBackend,
    NixlDescription,
    list_descriptors,
    list_regions,
    load_nixl,
    make_table,
)


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[nixl\]'.*--no-deps nixl nixl-cu12"):
        NixlBackend(make_kv("NHD", 4))


@pytest.mark.parametrize("pair", LAYOUT_PAIRS)
def test_registered_regions_are_disjoint_and_cover_all_spans(pair):
    for storage in LAYOUT_PAIRS[pair](5, 7):
        regions = list(list_regions(storage))
        assert all(begin < end for begin, end in regions)
        assert all(before[1] < after[0] for before, after in pairwise(regions))
        for row in storage.segments.to_segments():
            for block_id in range(storage.num_blocks):
                start = row.base_address + block_id * row.stride_bytes
                assert any(begin <= start and start + row.span_bytes <= end for begin, end in regions)


def test_descriptors_are_ordered_row_by_row():
    table = make_rows(10, [8, 16], 4, "x").segments
    got = list_descriptors(np.array([3, 1]), table)
    assert got.tolist() == [3, 1, 13, 11]
    assert got.dtype == np.int32


def test_a_description_without_rows_is_refused():
    with pytest.raises(PeerUnavailableError, match="no rows"):
        make_table(NixlDescription(b"", "DRAM", 0, 4, []))


@pytest.mark.nixl
def test_close_ends_the_thread_and_is_idempotent():
    before = set(threading.enumerate())
    backend = NixlBackend(make_kv("NHD", 4))
    assert {thread.name for thread in set(threading.enumerate()) - before} == {"kv_pool nixl"}
    backend.close()
    backend.close()
    assert not set(threading.enumerate()) - before


@pytest.mark.nixl
def test_nixl_prints_nothing(capfd):
    NixlBackend(make_kv("NHD", 4)).close()
    assert capfd.readouterr().out == ""


@pytest.mark.nixl
def test_without_a_thread_nothing_stays_registered(monkeypatch):
    agent_class = load_nixl().api.nixl_agent
    deregister = agent_class.deregister_memory
    released = []

    def note(agent, registered):
        deregister(agent, registered)
        released.append(registered)

    monkeypatch.setattr(agent_class, "deregister_memory", note)
    storage = make_kv("NHD", 4)
    with no_new_threads(), pytest.raises(OutOfThreadsError, match="kv_pool nixl"):
        NixlBackend(storage)
    assert len(released) == 2
    NixlBackend(storage).close()
