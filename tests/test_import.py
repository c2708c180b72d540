"""`import kv_pool` stays light. How long it takes is measured in benchmarks/bench_block_pool.py."""

import subprocess
import sys

HEAVY = ("torch", "zmq", "matplotlib", "numpy", "cbor2", "typer", "rich", "zstandard", "asyncio")


def run_new(code):
    """Return what a new Python prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_importing_kv_pool_loads_no_heavy_module():
    code = (
        "import sys; before = set(sys.modules); import kv_pool; "
        f"print(sorted(set({HEAVY!r}) & (set(sys.modules) - before)))"
    )
    assert run_new(code).strip() == "[]"


def test_pool_calls_import_nothing_with_the_lock_held():
    """The first compaction used to import NumPy, which took 100 ms."""
    code = (
        "import sys\n"
        "from kv_pool import BlockAllocationRequest, GPUKVPool\n"
        "pool = GPUKVPool(40, 4, run_length=4, on_moved=lambda relocation: relocation.make_remap())\n"
        "before = set(sys.modules)\n"
        "for number in range(20):\n"
        "    pool.allocate(BlockAllocationRequest(2, number))\n"
        "for number in range(0, 20, 2):\n"
        "    pool.free_sequence(number)\n"
        "moved = pool.defragment(goal=0.0) and pool.defragment()\n"
        "pool.allocate(BlockAllocationRequest(9, 99, contiguous='require'))\n"
        "pool.get_layout(), pool.get_statistics(), pool.shrink(5)\n"
        "print(moved > 0, sorted(name for name in set(sys.modules) - before if name[:6] != 'numpy.'))"
    )
    assert run_new(code).strip() == "True []"


def test_a_pool_by_id_imports_what_it_needs():
    """It imported 128 modules: also the tables of requests and the migration between pools."""
    code = (
        "import sys\n"
        "from kv_pool import BlockAllocationRequest, GPUKVPool\n"
        "pool = GPUKVPool(40, 4)\n"
        "names = [name for name in sys.modules if name.startswith('kv_pool')]\n"
        "parts = {tuple(name.split('.')[1:2]) for name in names}\n"
        "tables = [name for name in names if name.startswith('kv_pool.manager.')]\n"
        "print(len(names) <= 80, {name.split('.')[2] for name in tables}, ('migration',) in parts)\n"
        "pool.allocate(BlockAllocationRequest(2, 1, priority=1))  # imports the retention, without the lock\n"
        "pool.cache_prefix(1, [b'first'])\n"
        "before = set(sys.modules)\n"
        "pool.free_sequence(1)\n"
        "print(pool.retention.num_retained, sorted(set(sys.modules) - before))"
    )
    assert run_new(code).splitlines() == ["True {'sequences'} False", "1 []"]


def test_a_pool_reads_no_metadata_of_installed_packages():
    code = (
        "import sys; before = set(sys.modules); from kv_pool import BlockPool; "
        "BlockPool(8, True, 4, policy='s3fifo'); "
        "print('importlib.metadata' in set(sys.modules) - before)"
    )
    assert run_new(code).strip() == "False"


def test_storage_in_host_memory_needs_no_torch():
    code = (
        "import sys; from kv_pool.storage import KVStorage; storage = KVStorage.allocate(4, 4, 2, 2, 8); "
        "storage.apply_moves([(3, 1)]); print('torch' in sys.modules)"
    )
    assert run_new(code).strip() == "False"


def test_event_names_load_lazily_and_most_without_pyzmq():
    code = (
        "import sys; before = set(sys.modules); import kv_pool.events as events; dir(events)\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('kv_pool.events')))\n"
        "sys.modules['zmq'] = None\n"
        "from kv_pool.errors import MissingDependencyError\n"
        "need_zmq = []\n"
        "for name in events.__all__:\n"
        "    try: getattr(events, name)\n"
        "    except MissingDependencyError: need_zmq.append(name)\n"
        "print(need_zmq)"
    )
    assert run_new(code).splitlines() == [
        "['kv_pool.events']",
        "['ZMQEventPublisher', 'KVEventSubscriber', 'SubscriberStatistics']",
    ]
