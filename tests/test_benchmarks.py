"""Benchmarks write no results while other programs are running."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPT = """
import sys
import measuring
measuring.LOAD_AT_START = float(sys.argv.pop(1))
options = measuring.read_options(measuring.make_parser(None), blocks=5)
measuring.write_results(options, {"found": 7})
"""


@pytest.mark.parametrize(
    ("load", "options", "status", "is_written"),
    [
        ("1.4", "--json FILE", 0, True),
        ("9999", "--json FILE", 2, False),
        ("9999", "--json FILE --quick", 0, True),
        ("9999", "", 0, False),
    ],
)
def test_results_are_refused_under_load(tmp_path, load, options, status, is_written):
    path = tmp_path / "found.json"
    command = [sys.executable, "-c", SCRIPT, load, *options.replace("FILE", str(path)).split()]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, env={"PYTHONPATH": "."})
    assert done.returncode == status, done.stderr
    assert path.exists() == is_written
    if status:
        assert "the load average is 9999.0, and above" in done.stderr
        assert "Stop them or wait a minute, or run without --json" in done.stderr
