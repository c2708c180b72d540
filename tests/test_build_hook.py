"""The hook that compiles the core when a wheel is built, and the script that makes an environment."""

import importlib.util
import os
import runpy
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
def test_failed_compiled_build_leaves_no_temporary_folder(tmp_path):
    """Compilation fails in an empty folder."""
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


@pytest.mark.skipif(not HOOK.exists(), reason="needs the hook of a checkout")
def test_compiled_files_are_reused_for_the_same_sources(tmp_path):
    hook_class = runpy.run_path(str(HOOK))["CompileCore"]
    compiled = []

    class CountingHook(hook_class):
        def _compile(self, build_dir):
            compiled.append(build_dir)
            (build_dir / "lib" / "kv_pool").mkdir(parents=True)
            (build_dir / "lib" / "kv_pool" / "core.so").write_text(f"build {len(compiled)}")

    def build(source, number):
        (tmp_path / "kv_pool").mkdir(exist_ok=True)
        (tmp_path / "kv_pool" / "core.py").write_text(source)
        hook = CountingHook(str(tmp_path), {}, None, None, "here", "wheel", None)
        build_dir = tmp_path / f"temporary-{number}"
        build_dir.mkdir()
        [(path, place)] = hook.compile_core(build_dir).items()
        assert place == "kv_pool/core.so"
        return Path(path).read_text()

    texts = [
        build(source, number) for number, source in enumerate(["x = 1", "x = 1", "x = 2", "x = 2", "x = 1"])
    ]
    assert texts == ["build 1", "build 1", "build 2", "build 2", "build 3"]
    assert len(list((tmp_path / "build" / "compiled").iterdir())) == 1


SETUP = HOOK.parent.parent / ".ci" / "setup"


@pytest.mark.skipif(not SETUP.exists(), reason="needs the script of a checkout")
@pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="the script would install it")
def test_first_readme_command_prints_the_path_of_kv_pool(tmp_path):
    """The command is not on PATH, and the script used not to say where it is."""
    readme = (SETUP.parent.parent / "README.md").read_text()
    assert readme.index("sh .ci/setup") < readme.index("`. .venv/bin/activate` to put `kv-pool` on PATH")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\n')  # does not install
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
