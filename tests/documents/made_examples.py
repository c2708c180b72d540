"""Names of the examples."""

import importlib
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))


def load_example(name):
    """Return an example as a module, without running its `main`."""
    return importlib.import_module(name)
