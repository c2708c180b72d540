"""`benchmarks/gpu/run` without a GPU, and the check of its measurements."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


def run(*command, **environment):
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_an_unknown_option_is_refused():
    report = run("sh", str(FOLDER / "run"), "--fast")
    assert report.returncode == 2
    assert "unknown option --fast" in report.stderr


def test_missing_parts_are_named_with_the_way_out(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # without what is installed
    python.chmod(0o755)
    report = run("sh", str(FOLDER / "run"), PYTHON=str(python))
    assert report.returncode == 1
    assert "torch triton" in report.stderr
    assert "sh benchmarks/gpu/fetch" in report.stderr


@pytest.mark.torch
@pytest.mark.triton
def test_missing_gpu_is_reported():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    report = run("sh", str(FOLDER / "run"), PYTHON=sys.executable)
    assert report.returncode == 1
    assert "finds no GPU; --device cpu" in report.stderr


def write_figures(path, ours_ms, copy_ms, *, gpu="NVIDIA H100", num_moves=1000, block_bytes=2 * 2**20):
    provenance = {} if gpu is None else {"gpu": gpu}
    figures = {"apply_moves, triton": {"median": ours_ms}, "copy_, one call": {"median": copy_ms}}
    row = {"title": "scattered", "num_moves": num_moves, "block_bytes": block_bytes, "figures": figures}
    path.write_text(json.dumps({"provenance": provenance, "rows": [row]}))
    return run(sys.executable, str(FOLDER / "check_moves.py"), str(path))


@pytest.mark.parametrize(
    ("figures", "options", "status", "said"),
    [
        ((1.6, 1.5), {}, 0, "on NVIDIA H100: all met"),
        ((5.1, 5.0), {}, 1, "MISSED   5.10 ms,  98% of copy_"),
        ((2.0, 1.7), {}, 1, "MISSED   2.00 ms,  85% of copy_"),
        ((0.3, 0.3), {"num_moves": 32}, 1, "MISSED   9.38 ms"),
        ((1.6, 1.5), {"block_bytes": 65536}, 1, "no row of 2 MiB blocks"),
        ((9.0, 1.5), {"gpu": None}, 0, "measured on a CPU"),
    ],
)
def test_measured_moves_are_compared_with_the_target(figures, options, status, said, tmp_path):
    report = write_figures(tmp_path / "moves.json", *figures, **options)
    assert report.returncode == status
    assert said in report.stdout
