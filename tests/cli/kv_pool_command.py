"""`kv-pool`, run as a user runs it."""

import os
import subprocess
import sys


def kv_pool_command(*arguments, cwd, **variables):
    """Run it in a process of its own; stdout and stderr as text, wide enough that no line is folded."""
    return subprocess.run(
        [sys.executable, "-m", "kv_pool.cli.main", *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "250", "PYTHONIOENCODING": "utf-8", **variables},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
