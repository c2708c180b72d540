"""The entry point: help and user errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli.kv_pool_command import kv_pool_command
from replay.made_trace import record, write_trace

import kv_pool
from kv_pool.replay.capacity import MODELS

TRACE = [record(24, [1, 2, 3]), record(32, [1, 2, 4, 5])]


@pytest.fixture
def folder(tmp_path):
    write_trace(tmp_path / "trace.jsonl", TRACE)
    write_trace(tmp_path / "short.jsonl", [record(8, [1])])
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0" * 100)
    return tmp_path


def test_help_names_the_sub_commands(tmp_path):
    done = kv_pool_command("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("replay", "sweep", "serve", "stats", "defrag", "info"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("replay nowhere.jsonl --blocks 10", "nowhere.jsonl: no such file"),
        ("replay photo.jpg --blocks 10", "photo.jpg:1: JSON is malformed"),
        ("replay short.jsonl --blocks 10", "give --trace-block-size"),
        ("replay trace.jsonl --trace-block-size 8 --blocks 2", "the smallest request needs 3"),
        ("replay trace.jsonl --trace-block-size 8 --blocks 9 --clock wall", "unknown clock 'wall'"),
        ("replay trace.jsonl --trace-block-size 8 --memory much --model llama-3-8b", "'much' is not a size"),
        ("sweep trace.jsonl --trace-block-size 8 --blocks 2,9 --jobs 1", "the smallest request needs 3"),
    ],
)
def test_user_errors_are_one_line_and_status_2(folder, arguments, message):
    done = kv_pool_command(*arguments.split(), cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            ".",
            "this is a folder; give one of its files; bundled traces: ",
        ),
        ("-", "a trace is read more than once, so it cannot come from standard input or a pipe"),
        ("/dev/stdin", "a trace is read more than once, so it cannot come from standard input or a pipe"),
        (
            "table.csv",
            "table.csv:1: this is CSV, with the columns timestamp,input_length; kv-pool trace convert ",
        ),
    ],
)
def test_invalid_trace_error_describes_a_trace(folder, path, message):
    (folder / "table.csv").write_text("timestamp,input_length\n0,24\n")
    done = kv_pool_command("replay", path, "--blocks", "10", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("arguments", ["replay trace.jsonl", "serve trace.jsonl --socket here.sock"])
def test_ten_billion_blocks_are_refused_at_once(folder, arguments):
    sizes = ("--trace-block-size", "8", "--blocks", "10000000000")
    done = kv_pool_command(*arguments.split(), *sizes, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: a pool of 10,000,000,001 blocks needs 1," in done.stderr
    assert "GB are available" in done.stderr


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
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv_pool\nVersion: {kv_pool.__version__}\n"
    )
    (folder / "kv_pool" / "core").mkdir(parents=True)
    (folder / "kv_pool" / "core" / "block.cpython-311-x86_64-linux-gnu.so").touch()


@pytest.mark.skipif(kv_pool.COMPILED, reason="the sources run plain")
def test_sources_that_hide_a_compiled_package_say_so(tmp_path):
    root = Path(kv_pool.__file__).parents[1]
    installed = tmp_path / "installed"
    installed.mkdir()
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
