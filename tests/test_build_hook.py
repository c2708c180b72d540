"""The hook that compiles the core when a wheel is built, and the script that makes an environment."""

import importlib.util
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


SETUP = HOOK.parent.parent / ".ci" / "setup"


@pytest.mark.skipif(not SETUP.exists(), reason="needs the script of a checkout")
@pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="the script would install it")
def test_the_first_command_of_the_readme_says_where_kv_pool_is(tmp_path):
    """It left a user with a command that is not on PATH, and said nothing."""
    readme = (SETUP.parent.parent / "README.md").read_text()
    assert readme.index("sh .ci/setup") < readme.index("`. .venv/bin/activate` puts it on PATH")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\n')  # installs nothing
    python.chmod(0o700)
    done = subprocess.run(
        ["sh", str(SETUP)],
        env={
            **os.environ,
            "KV_POOL_VENV": str(tmp_path / "venv"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "venv" / "bin"
    last = f"the command is {folder}/kv-pool; to have it on PATH as kv-pool: . {folder}/activate"
    assert done.stderr.splitlines()[-1] == last
