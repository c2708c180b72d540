"""The connector works the same over vLLM's pool and over kv_pool's; there, stores have leases."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kv_pool

pytestmark = pytest.mark.vllm

TESTS = Path(__file__).parents[2]


def run(folder, plugins):
    metadata = folder / f"kv_pool-{kv_pool.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv_pool\nVersion: {kv_pool.__version__}\n"
    )
    declared = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nkv_pool = {declared['vllm.general_plugins']['kv_pool']}\n"
    )
    ours = Path(kv_pool.__file__).parent.parent
    told = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("connector_life.py")), str(folder)],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{ours}:{TESTS}:{folder}:{os.environ.get('PYTHONPATH', '')}",
            "VLLM_PLUGINS": plugins,
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def test_the_pool_changes_nothing_but_the_holds(tmp_path):
    theirs, ours = run(tmp_path / "theirs", ""), run(tmp_path / "ours", "kv_pool")
    for life in theirs:
        assert life.pop("pool") == "vllm.v1.core.block_pool"
        assert life.pop("holds") == []
    for life in ours:
        assert life.pop("pool") == "kv_pool.integrations.vllm.pool_classes"
        assert "leased to kv_pool's tiers" in life.pop("holds")
    assert ours == theirs
    assert all(life["counts"]["external"] for life in ours)
