"""The entry point: help, version and what it needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.kv_pool_command import kv_pool_command

import kv_pool
from kv_pool.lab.capacity import MODELS


def test_help_names_the_sub_commands(tmp_path):
    done = kv_pool_command("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("replay", "sweep", "serve", "stats", "defrag", "info"))


def test_module_runs_as_the_command_and_shows_the_version(tmp_path):
    done = kv_pool_command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"kv_pool {kv_pool.__version__}\n")
    module = [sys.executable, "-P", "-m", "kv_pool", "--version"]
    report = subprocess.run(
        module, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60, check=True
    )
    assert report.stdout == done.stdout


def test_missing_typer_error_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['typer'] = None; from kv_pool.cli.main import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == ("kv-pool needs typer and rich: pip install '.[cli]' in a checkout of kv_pool\n")


def test_a_shell_completes_sub_commands(tmp_path):
    asked = {"_KV_POOL_COMPLETE": "complete_bash", "COMP_WORDS": "kv-pool re", "COMP_CWORD": "1"}
    script = Path(sys.executable).with_name("kv-pool")
    report = subprocess.run(
        [script],
        cwd=tmp_path,
        env={**os.environ, **asked},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert report.stdout.split() == ["replay"], report.stderr


@pytest.mark.slow
def test_help_shows_brackets_and_models_and_plain_flags(tmp_path):
    done = kv_pool_command("serve", "--help", cwd=tmp_path)
    assert (
        "A TOML file that lists other nodes ([[peers]]) and the speed of links ([links.rack])" in done.stdout
    )
    assert "[OPTIONS] [TRACE]" in done.stdout
    assert "table [publisher]" in done.stdout
    for command in ("serve", "replay", "events", "migrate"):
        assert "bool" not in kv_pool_command(command, "--help", cwd=tmp_path).stdout
    report = " ".join(kv_pool_command("replay", "--help", cwd=tmp_path).stdout.split())
    assert all(model in report for model in MODELS)


def install_compiled(folder):
    """Write the metadata and the compiled core of an installed kv_pool into a folder of `sys.path`."""
    metadata = folder / f"kv_pool-{kv_pool.__version__}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv_pool\nVersion: {kv_pool.__version__}\n"
    )
    (folder / "kv_pool" / "core").mkdir(parents=True)
    (folder / "kv_pool" / "core" / "block.cpython-311-x86_64-linux-gnu.so").touch()


@pytest.mark.skipif(kv_pool.COMPILED, reason="the sources run plain")
def test_sources_that_hide_a_compiled_package_say_so(tmp_path):
    root = tmp_path / "sources"  # as in a checkout, without the metadata of an installation
    root.mkdir()
    (root / "kv_pool").symlink_to(Path(kv_pool.__file__).parent)
    installed = tmp_path / "installed"
    install_compiled(installed)

    def run(*path):
        return subprocess.run(
            [sys.executable, "-m", "kv_pool", "--version"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            capture_output=True,
            encoding="utf-8",
            timeout=60,
            check=True,
        )

    assert run(installed).stdout == f"kv_pool {kv_pool.__version__}\n"
    assert run(installed).stderr == (
        f"note: the plain sources in {root} run, not the compiled package in {installed / 'kv_pool'}; "
        "for that one use kv-pool or python -P -m kv_pool\n"
    )
    assert run(installed, root).stderr == ""  # PYTHONPATH names them
    next(installed.glob("kv_pool/core/block.*")).unlink()
    assert run(installed).stderr == ""
