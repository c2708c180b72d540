"""The hook that compiles the core when a wheel is built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parent.parent / ".build" / "compile_core.py"

BUILD = """
import runpy, sys
hook = runpy.run_path(sys.argv[1])["CompileCore"]("here", {}, None, None, "here", "wheel", None)
hook.initialize("standard", {})
"""


@pytest.mark.skipif(not HOOK.exists(), reason="needs the hook of a checkout")
def test_a_failed_compiled_build_leaves_no_temporary_folder(tmp_path):
    """Nothing can be compiled in an empty folder."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(HOOK)],
        cwd=tmp_path,
        env={**os.environ, "KV_POOL_BUILD": "compiled", "TMPDIR": str(tmp_path / "temporary")},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "kv_pool" in done.stdout + done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []
