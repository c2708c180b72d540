"""The code, the counts and the vectors of the page about salts."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "kv_pool" / "manager" / "requests" / "salts.md").read_text()
VECTORS = json.loads((ROOT / "tests" / "core" / "data" / "salt_region_vectors.json").read_text())


def test_the_code_prints_what_is_shown():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout == shown


def test_the_table_of_vectors_is_that_of_the_file():
    for case in VECTORS["cases"]:
        (row,) = re.findall(rf"^\| {case['name']} \|.*$", PAGE, re.MULTILINE)
        second, third = case["hashes"]["sha256_cbor"][1:]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        keys = case["extra_keys_cbor"][1]
        assert cells[2:] == [f"`{keys}`" if keys else "none", f"`{second[:16]}`", f"`{third[:16]}`"]
