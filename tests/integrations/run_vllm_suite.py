"""Run vLLM's tests with kv_pool's classes, and compare with the same tests with vLLM's.

    python tests/integrations/run_vllm_suite.py VLLM_SOURCE [TEST_FILE ...] [--level pool|manager]
        [--theirs FILE] [--json RESULT] [--processes 2]

VLLM_SOURCE is the source tree of a checked vLLM version, importable with its test dependencies; files that it
does not have are omitted. kv_pool must be importable, too, compiled or plain: that build is tested.
Needs no GPU and no network: models have only the configurations in data/vllm_models.json. Lists tests with
different outcomes; data/vllm_suite_exceptions.json names those that may pass only with vLLM's classes, with
the reason. The exit status is the number of others that pass only with vLLM's classes, at most 99. --theirs
keeps the outcomes with vLLM's classes in a file, by test file: later runs, at any level, read them there and
add those of other test files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = HERE / "data" / "vllm_models.json"
EXCEPTIONS = HERE / "data" / "vllm_suite_exceptions.json"

# Tests that use the pool, its blocks or a scheduler, and do not all need a GPU.
TESTS = [
    "tests/v1/core",
    "tests/v1/kv_connector/unit",
    "tests/v1/simple_kv_offload",
    "tests/v1/ec_connector/unit/test_ec_transfer_params.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
    "tests/v1/spec_decode/test_dflash_lookahead.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/engine/test_kv_cache_group_metadata.py",
    "tests/v1/test_kv_cache_spec_registry.py",
    "tests/distributed/aux_output_connector",
]
# Those that touch the pool and the manager most; minutes instead of half an hour.
CONNECTORS = "tests/v1/kv_connector/unit/"
POOL_TESTS = [
    "tests/v1/core/test_kv_cache_metrics.py",
    "tests/v1/core/test_kv_cache_utils.py",
    "tests/v1/core/test_prefix_caching.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_single_type_kv_cache_manager.py",
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    CONNECTORS + "offloading_connector/test_events.py",
    CONNECTORS + "offloading_connector/test_scheduler.py",
    CONNECTORS + "test_invalid_blocks_correctness.py",
    CONNECTORS + "test_kv_load_failure_recovery.py",
    CONNECTORS + "test_remote_decode_lifecycle.py",
    CONNECTORS + "test_remote_prefill_lifecycle.py",
    CONNECTORS + "test_simple_cpu_offload_connector.py",
    "tests/v1/simple_kv_offload",
]
# They load weights, and an engine that starts in a test process breaks logging for later tests.
LEFT_OUT = [
    "tests/v1/core/prefix_cache/test_hybrid_prefix_cache_hit_rate.py",
    "tests/v1/core/test_reset_prefix_cache_e2e.py",
    "tests/v1/core/test_scheduler_e2e.py",
]
REVISION = "0" * 40


def write_model_cache(folder):
    """Write a Hugging Face cache with only the configuration of each model."""
    for name, files in json.loads(MODELS.read_text()).items():
        model = folder / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / REVISION
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(REVISION)
        for file_name, content in files.items():
            (snapshot / file_name).write_text(json.dumps(content))


def list_files(tests, source):
    """Return the test files that this source has, of folders all but those left out."""
    files = []
    for name in tests:
        path = source / name.partition("::")[0]
        if path.is_dir():
            found = sorted(str(file.relative_to(source)) for file in path.rglob("test_*.py"))
            files += [file for file in found if file not in LEFT_OUT]
        elif path.exists():
            files.append(name)
    return list(dict.fromkeys(files))


def run_tests(source, tests, with_ours, options):
    """Run vLLM's tests; return the outcome by test id: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        write_model_cache(Path(folder))
        return run_in_folder(source, tests, Path(folder), with_ours, options)


def run_in_folder(source, tests, folder, with_ours, options):
    report = folder / "report.xml"
    environment = {
        **os.environ,
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # tests read vLLM's log
        "KV_POOL_VLLM": options.level,
        "CLASSES_UNDER_TEST": "kv_pool" if with_ours else "vllm",
        "PYTEST_PLUGINS": "vllm_suite_plugin",
        "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-n", str(options.processes), "--timeout", "120"]
    subprocess.run([*command, *tests], cwd=source, env=environment, stdout=sys.stderr)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found = {child.tag for child in case}
        outcome = "failed" if found & {"failure", "error"} else "skipped" if "skipped" in found else "passed"
        # A module that is skipped as a whole has a name only.
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        if outcomes.get(name) != "failed":  # a test may occur twice because of its teardown
            outcomes[name] = outcome
    return outcomes


def file_of(name, source):
    """Return the file of a test: tests/v1/core/test_x.py for `tests.v1.core.test_x.TestY::test_z`."""
    parts = name.partition("::")[0].split(".")
    while parts and not (source / ("/".join(parts) + ".py")).exists():
        parts.pop()
    return "/".join(parts) + ".py" if parts else name.partition("::")[0]


def read_theirs(source, tests, options):
    """Return the outcomes with vLLM's classes: those in the file, and of other test files after a run."""
    known = json.loads(options.theirs.read_text()) if options.theirs.exists() else {}
    new = [name for name in tests if name not in known]
    if new:
        known |= {name: {} for name in new}
        for name, outcome in run_tests(source, new, False, options).items():
            known[file_of(name, source)][name] = outcome
        options.theirs.write_text(json.dumps(known, indent=1) + "\n")
    return {name: outcome for file_name in tests for name, outcome in known[file_name].items()}


def compare(theirs, ours):
    """Return the number of tests by outcome with vLLM's classes and with ours, and those that differ."""
    pairs = {
        name: (theirs.get(name, "missing"), ours.get(name, "missing"))
        for name in sorted(theirs.keys() | ours.keys())
    }
    return Counter(pairs.values()), {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def read_exceptions(level):
    """Return the reason by id of the tests that need vLLM's own classes at this level."""
    return json.loads(EXCEPTIONS.read_text())[level]


def find_outdated(exceptions, ours, source):
    """Return the named exceptions that pass with our classes, or whose file was run without them."""
    files = {file_of(name, source) for name in ours}
    return [
        name
        for name in exceptions
        if ours.get(name) == "passed" or (name not in ours and file_of(name, source) in files)
    ]


def find_unexplained(different, exceptions):
    """Return the tests that pass only with vLLM's classes, for no named reason."""
    return [name for name, (before, _) in different.items() if before == "passed" and name not in exceptions]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--level", choices=("pool", "manager"), default="pool")
    parser.add_argument("--theirs", type=Path, help="outcomes with vLLM's classes: read, and added if absent")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.theirs and any("::" in name for name in options.tests):
        parser.error("--theirs keeps the outcomes of whole test files: name no test")
    tests = list_files(options.tests or TESTS, options.source)
    if options.theirs:
        theirs = read_theirs(options.source, tests, options)
    else:
        theirs = run_tests(options.source, tests, False, options)
    ours = run_tests(options.source, tests, True, options)
    counts, different = compare(theirs, ours)
    for (before, after), count in counts.items():
        print(f"{count} tests {before} with vLLM's classes, {after} with ours")
    exceptions = read_exceptions(options.level)
    for name, (before, after) in different.items():
        reason = f" ({exceptions[name]})" if name in exceptions else ""
        print(f"{name}: {before} with vLLM's classes, {after} with ours{reason}")
    unexplained = find_unexplained(different, exceptions)
    for name in find_outdated(exceptions, ours, options.source):
        print(f"{name} is in {EXCEPTIONS.name}, but it passes or does not exist: remove it")
    named = sum(name in exceptions for name in different)
    print(f"only with vLLM's classes: {len(unexplained)} tests, and {named} for a named reason")
    if options.json:
        found = {"different": different, "unexplained": unexplained}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(min(99, len(unexplained)))


if __name__ == "__main__":
    main()
