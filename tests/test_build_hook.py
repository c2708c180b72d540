"""The hook that compiles the core when a wheel is built, and the script that makes an environment."""

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.skipif(not HOOK.exists(), reason="needs the hook of a checkout")
def test_build_without_a_c_compiler_is_plain_and_says_so(tmp_path):
    build = BUILD.replace('"standard", {}', '"standard", data := {}') + "print(sorted(data))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(HOOK)],
        cwd=tmp_path,
        env={**os.environ, "KV_POOL_BUILD": "auto", "CC": "no-such-compiler -g"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=True,
    )
    reason = "the core is not compiled and runs as plain Python: there is no C compiler (no-such-compiler)"
    assert done.stdout.splitlines() == [f"kv_pool: {reason}", "[]"]


TRANSLATE = """
import pathlib, runpy, sys
hook_class = runpy.run_path(sys.argv[1])["CompileCore"]
hook_class._compile.__globals__["build_in_parallel"] = lambda command: sys.exit("translated to C")
hook_class(sys.argv[2], {}, None, None, sys.argv[2], "wheel", None)._compile(pathlib.Path(sys.argv[3]))
"""


@pytest.mark.skipif(not HOOK.exists(), reason="needs the hook of a checkout")
def test_half_installed_package_does_not_matter_to_mypyc(tmp_path):
    """The set-up installs NumPy while mypyc reads; half of it made some compilations fail."""
    for name in ("numpy", "ml_dtypes", "zmq"):
        (tmp_path / "half" / name).mkdir(parents=True)
        (tmp_path / "half" / name / "__init__.pyi").write_text("def cut_off(")
    (tmp_path / "build").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TRANSLATE, str(HOOK), str(HOOK.parent.parent), str(tmp_path / "build")],
        env={**os.environ, "MYPYPATH": str(tmp_path / "half")},
        capture_output=True,
        encoding="utf-8",
        timeout=200,
        check=False,
    )
    assert done.stderr.splitlines()[-1] == "translated to C", done.stdout


@pytest.mark.skipif(not HOOK.exists(), reason="needs the hook of a checkout")
@pytest.mark.parametrize("failures", [1, 2])
def test_c_file_that_failed_is_compiled_once_more(failures, capfd):
    """Two compilers at a time may have been too much for the memory."""
    calls, linked = [], []

    def compile_file(sources, **_):
        calls.extend(sources)
        if sources == ["b.c"] and calls.count("b.c") <= failures:
            raise RuntimeError("killed")
        return [source.replace(".c", ".o") for source in sources]

    options = {"extra_objects": [], "extra_compile_args": [], "include_dirs": []}
    extension = SimpleNamespace(sources=["c.c", "b.c", "a.c"], **options)
    command = SimpleNamespace(
        extensions=[extension],
        compiler=SimpleNamespace(compile=compile_file, compiler_type="unix"),
        build_temp="here",
        build_extension=lambda extension: linked.append(extension.extra_objects),
    )
    build = runpy.run_path(str(HOOK))["build_in_parallel"]
    if failures == 1:
        build(command)
        assert linked == [["a.o", "b.o", "c.o"]]
    else:
        with pytest.raises(RuntimeError, match="killed"):
            build(command)
        assert linked == []
    assert sorted(calls) == ["a.c", "b.c", "b.c", "c.c"]
    assert "compiling b.c again, alone" in capfd.readouterr().out


@pytest.mark.skipif(not HOOK.exists(), reason="needs the hook of a checkout")
def test_modules_with_one_last_name_are_in_different_files(tmp_path):
    """Each library has a function `PyInit_` with the last part of the module's name, which must be unique."""
    names = [f"kv_pool.core.part{number}" for number in range(20)]
    names += ["kv_pool.core.repairing", "kv_pool.manager.repairing"]
    shims = [SimpleNamespace(name=name, sources=[f"{name.replace('.', '/')}.c"]) for name in names]
    groups = runpy.run_path(str(HOOK))["group_shims"](tmp_path, shims)
    assert sorted(shim.name for group in groups for shim in group) == sorted(names)
    for group in groups:
        last_parts = [shim.name.rpartition(".")[2] for shim in group]
        assert len(set(last_parts)) == len(last_parts) <= 16
        code = Path(group[0].sources[0]).read_text()
        included = re.findall(r'#include "(.*)\.c"', code)
        assert included == [shim.name.replace(".", "/") for shim in group]


INSTALL = HOOK.parent / "install.py"

PIP_OUTPUT = """
Processing ./kv_pool
  Installing build dependencies: started
  Collecting mypy
  kv_pool: translating 122 modules to C with mypyc
  kv_pool: compiled C file 1 of 2
  kv_pool: compiled C file 2 of 2
Successfully built kv_pool
"""


@pytest.mark.skipif(not INSTALL.exists(), reason="needs the script of a checkout")
def test_setup_shows_stages_and_the_end_of_a_failed_build(tmp_path, capfd):
    install = runpy.run_path(str(INSTALL))
    scope = install["run_pip"].__globals__
    scope["LOG"] = tmp_path / "setup.log"
    scope["PIP"] = (sys.executable, "-c", "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))")
    install["run_pip"](PIP_OUTPUT, "0", display=install["Display"]())
    stages = [line.partition("] ")[2] for line in capfd.readouterr().err.splitlines()]
    assert stages == [
        "fetching hatchling and mypy, which build kv_pool",
        "translating 122 modules to C with mypyc",
        "compiling 2 C files",
    ]
    with pytest.raises(SystemExit) as ended:
        install["run_pip"]("no space left", "3")
    assert ended.value.code == 3
    error = capfd.readouterr().err
    assert "no space left" in error
    assert f"pip failed; all that it printed is in {tmp_path / 'setup.log'}" in error
    assert "translating" in scope["LOG"].read_text()


SETUP = HOOK.parent.parent / ".ci" / "setup"


@pytest.mark.skipif(not SETUP.exists(), reason="needs the script of a checkout")
@pytest.mark.skipif(importlib.util.find_spec("ensurepip") is None, reason="the script would install it")
def test_first_readme_command_prints_the_path_of_kv_pool(tmp_path):
    """The command is not on PATH, and the script used not to say where it is."""
    readme = (SETUP.parent.parent / "README.md").read_text()
    assert readme.index("sh .ci/setup") < readme.index("`. .venv/bin/activate` to put `kv-pool` on PATH")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Does not install.
    python.write_text(f'#!/bin/sh\n[ "$1" = .build/install.py ] || exec {sys.executable} "$@"\n')
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
