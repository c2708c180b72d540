"""vLLM's scheduler and engine behave the same with kv_pool's classes as with its own (marker `vllm`)."""

import pytest
from integrations.vllm_process import VERSION, run_program

pytestmark = pytest.mark.vllm

POOL_LINE = f"{VERSION} manages"


def test_engine_computes_the_same(tmp_path):
    in_one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # otherwise batching depends on timing
    theirs, log = run_program("vllm_engine.py", tmp_path / "theirs", "", **in_one_process)
    assert "kv_pool" not in log
    ours, log = run_program("vllm_engine.py", tmp_path / "ours", "kv_pool", **in_one_process)
    assert f"{POOL_LINE} 40 KV blocks, medium GPU" in log
    assert ours == theirs
    assert sum(ours["cached"]) > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_engine_process_logs_that_it_uses_kv_pool(tmp_path, method):
    told, log = run_program(
        "vllm_engine.py", tmp_path / "ours", "kv_pool", VLLM_WORKER_MULTIPROC_METHOD=method
    )
    (line,) = [line for line in log.splitlines() if POOL_LINE in line]
    assert line.startswith("(EngineCore pid=")
    assert " INFO " in line
    assert sum(told["cached"]) > 0
