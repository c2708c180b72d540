"""Names of the examples."""

import importlib.util
from functools import cache
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@cache
def load_example(name):
    """Return an example as a module, without running its `main`."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
