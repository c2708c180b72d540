"""Errors of examples whose requirements are not installed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(
    "name", ["batching_a_model", "paged_generation", "paged_transformer", "prefill_and_decode"]
)
def test_example_without_torch_says_what_to_install(name):
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(EXAMPLES / name)!r} + '.py')"
    report = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert report.returncode == 1
    needed = r"this example needs (torch|torch and transformers) \(.*\): pip install '.\[(\w+)\]'\n"
    packages, extra = re.fullmatch(needed, report.stderr).groups()
    assert packages.endswith(extra)
