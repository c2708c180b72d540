"""`kv_pool.replay`, the former name of the lab, gives the same modules and names."""

import subprocess
import sys

FORMER = """
import warnings

with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import kv_pool.replay
assert "kv_pool.replay is kv_pool.lab now" in str(found[0].message)

import kv_pool.replay.curves.measure
from kv_pool.lab.curves import measure
from kv_pool.lab.simulator import run_replay
from kv_pool.replay.simulator import run_replay as former

assert sys.modules["kv_pool.replay.curves.measure"] is measure
assert measure.__spec__.name == "kv_pool.lab.curves.measure"
assert kv_pool.replay.run_replay is run_replay is former
import kv_pool.replay.nothing
"""


def test_former_modules_are_those_of_the_lab():
    done = subprocess.run([sys.executable, "-c", f"import sys\n{FORMER}"], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'kv_pool.replay.nothing'"
