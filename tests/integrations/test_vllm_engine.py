"""vLLM's scheduler and engine behave the same with kv_pool's classes as with its own (marker `vllm`)."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kv_pool
from kv_pool.integrations.vllm.releases import find_release

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
MODE = "compiled" if kv_pool.COMPILED else "plain Python"
POOL_LINE = f"kv_pool {kv_pool.__version__} ({MODE}) manages"


def vllm_version():
    import vllm

    return vllm.__version__


def run(program, folder, plugins, **environment):
    """Run a program in this folder; return its output and vLLM's log."""
    # The metadata of an installed kv_pool, in case the tests run on the sources.
    metadata = folder / f"kv_pool-{kv_pool.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv_pool\nVersion: {kv_pool.__version__}\n"
    )
    declared = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nkv_pool = {declared['vllm.general_plugins']['kv_pool']}\n"
    )
    ours = Path(kv_pool.__file__).parent.parent
    told = subprocess.run(
        [sys.executable, str(HERE / program), str(folder)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ours}:{folder}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_PLUGINS": plugins,
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout), told.stderr


def test_scheduler_makes_the_same_decisions(tmp_path):
    theirs, _ = run("vllm_schedule.py", tmp_path / "theirs", "")
    ours, log = run("vllm_schedule.py", tmp_path / "ours", "kv_pool")
    assert theirs.pop("pool") == "vllm.v1.core.block_pool"
    assert ours.pop("pool") == find_release(vllm_version()).pool_module
    assert f"{POOL_LINE} 60 KV blocks, medium GPU" in log
    assert ours == theirs
    assert any(step["preempted"] for step in ours["steps"])
    assert any(num_computed for step in ours["steps"] for _, _, num_computed in step["new"])
    assert any("BlockRemoved" in event for event in ours["events"])
    assert any(step["samples"] for step in ours["steps"])
    assert ours["reset"]


def test_engine_computes_the_same(tmp_path):
    in_one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # otherwise batching depends on timing
    theirs, log = run("vllm_engine.py", tmp_path / "theirs", "", **in_one_process)
    assert "kv_pool" not in log
    ours, log = run("vllm_engine.py", tmp_path / "ours", "kv_pool", **in_one_process)
    assert f"{POOL_LINE} 40 KV blocks, medium GPU" in log
    assert ours == theirs
    assert sum(ours["cached"]) > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_engine_process_logs_that_it_uses_kv_pool(tmp_path, method):
    told, log = run("vllm_engine.py", tmp_path / "ours", "kv_pool", VLLM_WORKER_MULTIPROC_METHOD=method)
    (line,) = [line for line in log.splitlines() if POOL_LINE in line]
    assert line.startswith("(EngineCore pid=")
    assert " INFO " in line
    assert sum(told["cached"]) > 0
