"""`run_program`: run a program on vLLM in a new process; vLLM finds the plugins of an installed kv_pool."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import kv_pool

HERE = Path(__file__).parent
TESTS = HERE.parent
MODE = "compiled" if kv_pool.COMPILED else "plain Python"
VERSION = f"kv_pool {kv_pool.__version__} ({MODE})"


def write_metadata(folder):
    """Write the metadata of an installed kv_pool into a folder of `sys.path`, for tests of the sources."""
    metadata = folder / f"kv_pool-{kv_pool.__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kv_pool\nVersion: {kv_pool.__version__}\n"
    )
    declared = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    (metadata / "entry_points.txt").write_text(
        "".join(f"[{group}]\nkv_pool = {plugins['kv_pool']}\n" for group, plugins in declared.items())
    )


def run_program(program, folder, plugins, *arguments, **environment):
    """Run a program of this folder; return its output, of which the last line is JSON, and vLLM's log.

    Args:
        program: a path from this folder. The program gets `folder` as its first argument.
        plugins: the value of VLLM_PLUGINS; None to leave it unset.
        environment: more variables.
    """
    write_metadata(folder)
    # First what comes first in this process: perhaps another vLLM than the installed one.
    ours = Path(kv_pool.__file__).parent.parent
    path = [os.environ.get("PYTHONPATH", ""), str(ours), str(TESTS), str(HERE), str(folder)]
    told = subprocess.run(
        [sys.executable, str(HERE / program), str(folder), *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": ":".join(filter(None, path)),
            **({} if plugins is None else {"VLLM_PLUGINS": plugins}),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "HF_HUB_OFFLINE": "1",
            **environment,
        },
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1]), told.stderr


def list_lines(log):
    """Return the lines of kv_pool in vLLM's log as (process, message)."""
    lines = [line for line in log.splitlines() if line.partition("] ")[2].startswith("kv_pool ")]
    return [(line.partition(" pid=")[0].lstrip("("), line.partition("] ")[2]) for line in lines]
