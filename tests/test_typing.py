"""All Python code in the documents passes `mypy --strict`, and so do the types described in words."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "kv_pool").rglob("README.md"))]

MADE_BEFORE = {
    "kv_pool/control/README.md": """
from typing import Any
from kv_pool import GPUKVPool, KVCacheManager, NodeName, SequenceId
from kv_pool.adapter import KVPoolMigrationManager
from kv_pool.migration.pool_sequences import PoolSequences
from kv_pool.control import ControlledManager, ControlServer
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.topology import read_peers
from kv_pool.migration.pool_site import PoolSite
from kv_pool.migration.secret import load_secret
from kv_pool.storage import KVStorage
engine: Any
gpu_pool: GPUKVPool
manager: KVCacheManager
storage: KVStorage
step_lock: Any
remap_tables: Any
""",
    "kv_pool/metrics/README.md": """
from kv_pool import GPUKVPool, KVCacheManager, Request
gpu_pool: GPUKVPool
manager: KVCacheManager
request: Request
""",
    "kv_pool/contiguous/README.md": """
from typing import Any
from kv_pool import GPUKVPool
from kv_pool.contiguous.defragmenter import Defragmenter
from kv_pool.storage import KVStorage
engine: Any
storage: KVStorage
""",
    "kv_pool/integrations/README.md": """
from typing import Any
import kv_pool
from kv_pool.core.kv_events import KVEventTypes
model: Any
token_ids: Any
Stored: Any
Removed: Any
Cleared: Any
EngineConfig = Any
EngineSample: Any
Status: Any
engine_setting: bool
""",
}
"""Names that documented fragments use without defining them."""

IN_WORDS = """
import numpy as np

from kv_pool import BlockHash, BlockHasher, KVCacheManager, Request, RequestId
from kv_pool.manager.requests.request import SchedulableRequest

hasher = BlockHasher("sha256", block_size=4)
request = Request(RequestId("r"), np.arange(10, dtype=np.int32), hasher)
request.append_output_token_ids(np.array([1, 2]))
hashes: list[BlockHash] = hasher.hash_blocks(np.arange(10))
schedulable: SchedulableRequest = request

def allocate(manager: KVCacheManager) -> None:
    manager.allocate_slots(request, np.int64(4))
"""


def take_code(page):
    """Return the Python blocks of a page as one program, with the names that they expect."""
    name = page.relative_to(ROOT).as_posix()
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return MADE_BEFORE.get(name, "") + "\n".join(blocks)


@pytest.mark.timeout(600)
def test_documented_code_passes_strict_type_checks(tmp_path):
    for page in PAGES:
        name = "_".join(page.relative_to(ROOT).parts[:-1]) or "top"
        (tmp_path / f"page_{name}.py").write_text(take_code(page))
    (tmp_path / "in_words.py").write_text(IN_WORDS)
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\n[mypy-torch]\nignore_missing_imports = True\n")  # it is optional
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        f"--config-file={config}",
        f"--cache-dir={ROOT / '.mypy_cache'}",
    ]
    checked = subprocess.run(
        [*command, *sorted(path.name for path in tmp_path.glob("*.py"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
