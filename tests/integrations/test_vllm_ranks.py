"""Several processes of one vLLM: each engine has a pool of its own, workers have none (marker `vllm`)."""

import re

import pytest
from integrations.vllm_process import VERSION, list_lines, run_program

from kv_pool.integrations.vllm.releases import is_checked

pytestmark = pytest.mark.vllm

REPLACED = {"pool": "block pool", "manager": "block pool and KV cache manager"}


@pytest.fixture(scope="module", autouse=True)
def _has_level_manager():
    import vllm

    if not is_checked("manager", vllm.__version__):
        pytest.skip("level manager is for vLLM 0.33")


def list_engine_lines(level, method, num_blocks, num_groups):
    """Return what each engine logs. Forked processes inherit the classes and do not log the replacement."""
    lines = [f"{VERSION} manages {num_blocks} KV blocks, medium GPU"]
    if method == "spawn":
        lines.append(f"{VERSION} replaces the {REPLACED[level]} of vLLM 0.33.0")
    if level == "manager":
        lines.append(
            f"kv_pool uses level manager: vLLM's scheduler calls its manager, KV cache groups: {num_groups}"
        )
    return lines


@pytest.mark.parametrize(
    ("level", "method"),
    [("manager", "fork"), pytest.param("pool", "spawn", marks=pytest.mark.slow)],
)
def test_data_parallel_engines_have_their_own_pools(tmp_path, level, method):
    seen, log = run_program(
        "data_parallel_engines.py",
        tmp_path,
        "kv_pool",
        KV_POOL_VLLM=level,
        KV_POOL_VLLM_CONTROL="1",
        XDG_RUNTIME_DIR=str(tmp_path),
        VLLM_WORKER_MULTIPROC_METHOD=method,
    )
    assert seen["cached"] == [0, 128, 0, 128, 0, 0, 128]
    lines = list_lines(log)
    assert {process for process, _ in lines} == {"EngineCore_DP0", "EngineCore_DP1"}
    ids = dict(re.findall(r"\((EngineCore_DP\d) pid=(\d+)\)", log))
    for process, pid in ids.items():
        path = tmp_path / "kv_pool" / f"control-vllm-{pid}.sock"
        expected = list_engine_lines(level, method, num_blocks=40, num_groups=1)
        expected.append(f"kv_pool answers at {path}: kv-pool stats --socket {path}")
        assert sorted(
            re.sub(r": \d classes.*", "", text) for name, text in lines if name == process
        ) == sorted(expected)
    num_requests = 0 if level == "manager" else None
    assert seen["nodes"] == {f"vllm-{pid}": [39, 16, num_requests] for pid in ids.values()}
    assert seen["ranks"] == {"rank 0": [0], "rank 1": [1]}
    assert seen["held"] == {"A": {"rank 0": 128, "rank 1": 128}, "B": {"rank 1": 128}, "C": {"rank 0": 128}}


@pytest.mark.parametrize(
    ("level", "method"),
    [
        ("manager", "fork"),
        pytest.param("manager", "spawn", marks=pytest.mark.slow),
        pytest.param("pool", "spawn", marks=pytest.mark.slow),
    ],
)
def test_tensor_parallel_workers_have_no_pools(tmp_path, level, method):
    seen, log = run_program(
        "vllm_connector/complete_engine.py",
        tmp_path,
        "kv_pool",
        "2",
        KV_POOL_VLLM=level,
        KV_POOL_VLLM_CONTROL="1",
        XDG_RUNTIME_DIR=str(tmp_path),
        VLLM_WORKER_MULTIPROC_METHOD=method,
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )
    assert seen["cached"][-1] == [32] * 12  # loaded from the tiers of both ranks
    assert seen["folders"] == ["rank0of2", "rank1of2"]
    for worker in seen["workers"]:
        found, manager = worker["classes"]
        assert found == "kv_pool.integrations.vllm.pool_control"
        assert manager.startswith("kv_pool" if level == "manager" else "vllm")
        assert worker["pools"] == 0
        assert worker["threads"] == ["kv_pool transfers"]  # of the connector; none of a control socket
    lines = list_lines(log)
    answers = [message for _, message in lines if message.startswith("kv_pool answers at ")]
    assert len(answers) == 1
    stores = "kv_pool stores blocks of 64 bytes in host memory, 1024 at most, and on disk, 16384 at most"
    keeps = "kv_pool keeps up to 1024 blocks in host memory and 16384 on disk, per rank of 2"
    expected = [("Worker_TP0", stores), ("Worker_TP1", stores), ("EngineCore", keeps)]
    expected += [("EngineCore", text) for text in list_engine_lines(level, method, 100, 2)]
    if method == "spawn":
        replaces = f"{VERSION} replaces the {REPLACED[level]} of vLLM 0.33.0"
        expected += [("VllmWorker-0", replaces), ("VllmWorker-1", replaces)]
    found = [(name, re.sub(r": \d classes.*", "", text)) for name, text in lines if text not in answers]
    assert sorted(found) == sorted(expected)
