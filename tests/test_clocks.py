"""Clocks are passed as arguments, so that tests can set the time."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "kv_pool"
READS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep", "time", "time_ns"}
READS_BY_NAME = {
    "migration": "deadlines of channels, handshakes and backends are times of `time.monotonic()` by contract",
    "cli/migrate.py": "between two looks at a migration of another process",
    "metrics/residency.py": "vLLM's tests replace the clock inside the module `time`",
}


def count_reads(source):
    """Count calls such as `time.monotonic()`; a clock passed as an argument or default does not count."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "time"
        and node.func.attr in READS
        for node in ast.walk(ast.parse(source))
    )


def test_no_clock_is_read_by_name():
    reading = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if count_reads(path.read_text())]
    named = {path.parts[0] if path.parts[0] in READS_BY_NAME else str(path) for path in reading}
    assert named == set(READS_BY_NAME)


def test_check_detects_a_clock_read_by_name():
    assert count_reads("import time\ndef wait(): time.sleep(1); return time.monotonic()") == 2
    assert count_reads("import time\ndef wait(clock=time.monotonic): return clock()") == 0
