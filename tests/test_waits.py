"""No test waits for ever or depends on how the suite was started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv_pool

ROOT = Path(__file__).parent.parent


def run_pytest(*arguments, before=""):
    """Run another pytest with this project's settings and the same kv_pool."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    return subprocess.run(
        ["sh", "-c", f'{before} exec "$@"', "sh", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(Path(kv_pool.__file__).parent.parent)},
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )


@pytest.mark.slow
def test_ctrl_c_tests_pass_where_sigint_is_ignored():
    sends_it = ROOT / "tests/cli/test_events.py::test_ctrl_c_ends_it_silently"
    done = run_pytest(sends_it, "-o", "timeout=60", "-o", "faulthandler_timeout=90", before="trap '' INT;")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_hanging_cleanup_of_a_test_is_ended(tmp_path):
    (tmp_path / "test_hangs.py").write_text(
        "import threading\n"
        "def test_hangs():\n"
        "    try:\n"
        "        threading.Event().wait()\n"
        "    finally:\n"
        "        threading.Event().wait()\n"
    )
    bounds = ["-o", "timeout=0.5", "-o", "faulthandler_timeout=2"]
    done = run_pytest(tmp_path / "test_hangs.py", "-c", ROOT / "pyproject.toml", "-s", *bounds)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert 'test_hangs.py", line 6 in test_hangs' in done.stderr
