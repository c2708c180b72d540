"""Names of the examples."""

import importlib
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def load_example(name):
    """Return an example as a module, without running its `main`."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # some examples import others
    return importlib.import_module(name)
