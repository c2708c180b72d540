"""The scheduler of examples/continuous_batching.py; engine authors copy it, so it is tested."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parent.parent.parent / "examples" / "continuous_batching.py"
_spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

Scheduler = _module.Scheduler
Sequence = _module.Sequence
StandIn = _module.StandIn
generate_without_blocks = _module.generate_without_blocks
