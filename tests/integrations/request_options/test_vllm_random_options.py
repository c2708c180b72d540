"""Random options under vLLM's real schedulers: nothing stops them, nothing is left over (marker `vllm`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv_pool

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
@pytest.mark.parametrize("scheduler", ["synchronous", "connector"])
def test_random_options_under_the_scheduler(tmp_path, scheduler, seed):
    metadata = tmp_path / f"kv_pool-{kv_pool.__version__}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv_pool\nVersion: {kv_pool.__version__}\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkv_pool = kv_pool.integrations.vllm:register\n"
    )
    paths = [Path(kv_pool.__file__).parent.parent, tmp_path, HERE.parent, os.environ.get("PYTHONPATH", "")]
    told = subprocess.run(
        [sys.executable, str(HERE / "vllm_random_options.py"), str(tmp_path), str(seed), scheduler],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
            "VLLM_PLUGINS": "kv_pool",
            "KV_POOL_VLLM": "manager",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert told.returncode == 0, told.stderr
    seen = json.loads(told.stdout)
    for what in ("preempted", "aborted", "pinned", "sessions", "retained"):
        assert seen[what] > 0, (what, seen)
    if scheduler == "connector":
        for field in ("retained_tokens", "expires_in_ms", "changed_blocks", "ended_session", "refused"):
            assert seen[f"report {field}"] > 0, (field, seen)
