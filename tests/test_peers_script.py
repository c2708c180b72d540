"""`.ci/peers` sets up every program that tests need."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "peers"
PEERS = re.search(r"default: (.*)", SCRIPT.read_text())[1].split()


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_has_marked_tests(peer):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "markers"
    ]
    assert any(mark.startswith(f"{peer}: ") for mark in declared)
    sources = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert any(re.search(rf"pytest\.mark\.{peer}\b", source) for source in sources)


@pytest.mark.parametrize("peer", ["nobody", "", "VLLM"])
def test_unknown_peer_is_refused_before_any_setup(peer):
    done = subprocess.run([SCRIPT, "nixl", peer], capture_output=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("known are: parity vllm dynamo smg router nixl dask ray engine\n")
