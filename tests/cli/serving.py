"""A pool that `kv-pool serve` serves in a process of its own, from its first line to its last."""

import os
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def serving(*arguments, cwd):
    """The process, when it has said where its socket is: `first_line`. Killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kv_pool.cli.main", "serve", *arguments],
        cwd=cwd,
        env={**os.environ, "XDG_RUNTIME_DIR": str(cwd), "PYTHONIOENCODING": "utf-8"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    with process:
        process.first_line = process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
