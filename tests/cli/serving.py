"""A `kv-pool serve` process for the time of a test."""

import os
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def serving(*arguments, cwd):
    """Yield the process once it has printed its `first_line`; kill it at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kv_pool.cli.main", "serve", *arguments],
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
