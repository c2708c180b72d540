"""The guide's example prints what the guide says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kv_pool

pytestmark = pytest.mark.torch

GUIDE = Path(kv_pool.__file__).parent / "integrations" / "attention" / "README.md"


def test_the_guide_to_attention_prints_what_it_says():
    guide = GUIDE.read_text()
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", guide, re.DOTALL).groups()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output
