"""The guide's example prints the output shown in the guide."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kv_pool

pytestmark = pytest.mark.torch

GUIDE = Path(kv_pool.__file__).parent / "integrations" / "attention" / "README.md"


def test_the_attention_guide_prints_its_output():
    guide = GUIDE.read_text()
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", guide, re.DOTALL).groups()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == output
