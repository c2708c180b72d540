"""Pools that do not fit into the machine's memory are refused before they allocate."""

import os
import subprocess
import sys

import pytest

import kv_pool
from kv_pool import BlockPool, KVPoolError
from kv_pool.core.pool_size import BYTES_PER_BLOCK, UNCHECKED_BLOCKS, check_fits_memory, count_available_bytes
from kv_pool.errors import PoolTooLargeError


def test_a_pool_too_large_for_memory_is_refused():
    needed = 10**10 * BYTES_PER_BLOCK / 1e9
    with pytest.raises(PoolTooLargeError, match=rf"10,000,000,000 blocks needs {needed:,.1f} GB") as raised:
        BlockPool(10**10, True, 16)
    assert isinstance(raised.value, KVPoolError)
    assert isinstance(raised.value, MemoryError)
    assert isinstance(raised.value, ValueError)


def test_the_limit_is_the_available_memory():
    available = count_available_bytes()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(PoolTooLargeError):
        check_fits_memory(max(UNCHECKED_BLOCKS + 1, 2 * available // BYTES_PER_BLOCK))


def test_memory_use_agrees_with_the_estimate():
    measured = (
        "from kv_pool import BlockPool\n"
        "def count(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "before = count(); pool = BlockPool(500_000, True, 16); print((count() - before) / 500_000)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", measured],  # the package under test, whatever the current folder
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(kv_pool.__file__))},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    assert float(done.stdout) == pytest.approx(BYTES_PER_BLOCK, rel=0.05)
