"""What examples say where something that they need is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["batching_a_model", "paged_generation", "prefill_and_decode"])
def test_without_torch_an_example_says_what_to_install(name):
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(EXAMPLES / name)!r} + '.py')"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert told.returncode == 1
    assert told.stderr.startswith("this example needs torch and transformers (")
    assert told.stderr.endswith("): pip install '.[transformers]'\n")
