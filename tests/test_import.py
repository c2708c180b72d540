"""`import kv_pool` stays light. How long it takes is measured in benchmarks/bench_block_pool.py."""

import subprocess
import sys

HEAVY = ("torch", "zmq", "matplotlib", "numpy", "cbor2", "typer", "rich", "zstandard", "asyncio")


def test_importing_kv_pool_pulls_in_nothing_heavy():
    code = (
        "import sys; before = set(sys.modules); import kv_pool; "
        f"print(sorted(set({HEAVY!r}) & (set(sys.modules) - before)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_storage_in_host_memory_needs_no_torch():
    code = (
        "import sys; from kv_pool.storage import KVStorage; storage = KVStorage.allocate(4, 4, 2, 2, 8); "
        "storage.apply_moves([(3, 1)]); print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
