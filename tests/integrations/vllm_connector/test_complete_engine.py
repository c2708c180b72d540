"""A complete vLLM loads the connector by its name, and loads what its pool has evicted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv_pool

pytestmark = pytest.mark.vllm

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize("in_one_process", ["0", "1"])
def test_engine_loads_what_its_pool_has_evicted(tmp_path, in_one_process):
    ours = Path(kv_pool.__file__).parent.parent
    told = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("complete_engine.py")), str(tmp_path)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ours}:{TESTS}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_ENABLE_V1_MULTIPROCESSING": in_one_process,
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["cached"][0] == [0] * 12
    assert found["cached"][-1] == [32] * 12
    assert "kv_pool keeps up to 1024 blocks in host memory and 16384 on disk, per rank of 1" in told.stderr
    assert "kv_pool stores blocks of 64 bytes in host memory, 1024 at most" in told.stderr
