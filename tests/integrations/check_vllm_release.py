"""Check whether kv_pool fits a release of vLLM, and if so, add it to `releases.py`.

    python tests/integrations/check_vllm_release.py 0.34.0 [--level pool|manager] [--suites pool|all|none]
        [--source FOLDER] [--theirs FILE]

Run it in the environment that `.ci/peers vllm` makes, which it does not change. It tests the sources of
kv_pool in this checkout, with the classes for the newest release in `releases.py` that is not newer:

1. Downloads the source of the release, or takes it from FOLDER.
2. Compares the names that vLLM uses with those of our classes.
3. Runs the random parity tests, and a scheduler and an engine with and without kv_pool.
4. Runs vLLM's own tests with its classes and with ours. --theirs keeps the outcomes with its classes in a
   file, which the other level reads.

Lists what does not fit, one line each; the exit status is 1 then.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))


ENTRIES = ROOT / "kv_pool" / "integrations" / "vllm" / "releases.py"

PARITY_TESTS = {
    "pool": [
        "tests/core/test_parity_with_vllm.py",
        "tests/integrations/test_vllm_engine.py",
        "tests/integrations/test_vllm_scheduler_random.py",
        "-k=not test_vllm_scheduler_random or same_steps[pool",
    ],
    "manager": ["tests/integrations/test_vllm_scheduler_random.py"],
}


def download(version, folder):
    """Return the unpacked source of a release; download it unless it is there."""
    source = folder / f"vllm-{version}"
    if not source.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={version}"]
        # pip runs the build to learn the name of the archive; the tools are in the environment.
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VLLM_VERSION_OVERRIDE": version,
            "VLLM_TARGET_DEVICE": "empty",
        }
        subprocess.run([*command, "-d", str(folder)], env=environment, check=True)
        with tarfile.open(folder / f"vllm-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return source


def make_environment(source):
    """Return the environment variables for a process that uses this source, checked or not."""
    paths = [str(ROOT), str(ROOT / "tests"), str(source), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "KV_POOL_VLLM_FORCE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def compare_names(level, environment):
    """Return what kv_pool's classes lack; if vLLM cannot be imported, the error with the way out."""
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_names.py"), level], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        return [f"cannot compare the names: {reason}. Are the release's requirements installed?"]
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def run_parity(tests, environment):
    """Return the tests that failed, with the last line of each error."""
    # Our tests treat the warnings of pytest-asyncio, which vLLM needs, as errors.
    plugins = ["-p", "no:cacheprovider", "-p", "no:asyncio"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "vllm and not slow", *plugins]
    done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return []
    failed = re.findall(r"^(?:FAILED|ERROR) (.*)", done.stdout, re.MULTILINE)
    return failed or [f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-500:]}"]


def run_suites(source, level, tests, environment, options):
    """Return the tests of vLLM that pass only with its own classes, without the named exceptions."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / "run_vllm_suite.py"), str(source), *tests]
        command += ["--level", level, "--json", str(result), "--processes", str(options.processes)]
        command += ["--theirs", str(options.theirs)] if options.theirs else []
        done = subprocess.run(command, env=environment)
        if not result.exists():
            return [f"vLLM's tests could not run: status {done.returncode}"]
        found = json.loads(result.read_text())
    outcomes = {name: after for name, (_, after) in found["different"].items()}
    return [f"{name}: {outcomes[name]} with our classes, passed with vLLM's" for name in found["unexplained"]]


def add_entry(text, level, version, day):
    """Return the text of `releases.py` with this entry; unchanged if it has one for the version."""
    head, start, rest = text.partition(f'    "{level}": {{\n')
    if not start:
        raise ValueError(f"releases.py has no level {level}")
    inside, end, tail = rest.partition("    },\n")
    lines = inside.splitlines(keepends=True)
    if any(line.strip().startswith(f'"{version}":') for line in lines):
        return text
    lines.append(f'        "{version}": "{day}",\n')
    lines.sort(key=lambda line: [int(number) for number in re.findall(r"\d+", line.partition(":")[0])])
    return "".join([head, start, *lines, end, tail])


def find_differences(source, level, options):
    """Yield a title and its findings for each step. Later steps need the names of the earlier ones."""
    from run_vllm_suite import POOL_TESTS, TESTS

    environment = make_environment(source)
    missing = compare_names(level, environment)
    yield "names", missing
    if missing:
        return
    yield "parity", run_parity(PARITY_TESTS[level], environment)
    if options.suites != "none":
        tests = TESTS if options.suites == "all" else POOL_TESTS
        yield "vLLM's own tests", run_suites(source, level, tests, environment, options)


def record(level, version):
    """Add the version to `releases.py`; return what happened."""
    before = ENTRIES.read_text()
    after = add_entry(before, level, version, datetime.datetime.now(datetime.UTC).date().isoformat())
    ENTRIES.write_text(after)
    return "it is listed already" if after == before else f"added to {ENTRIES.name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--level", choices=list(PARITY_TESTS), default="pool")
    parser.add_argument("--source", type=Path, help="the unpacked source, if it need not be downloaded")
    parser.add_argument("--folder", type=Path, default=Path(sys.prefix), help="where downloads are kept")
    parser.add_argument("--suites", choices=["pool", "all", "none"], default="pool")
    parser.add_argument("--theirs", type=Path, help="as for run_vllm_suite.py: one file per release")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    level, name = options.level, f"vLLM {options.version}"
    source = (options.source or download(options.version, options.folder)).resolve()
    num_differences = 0
    for title, found in find_differences(source, level, options):
        print(f"{title}: {len(found) or 'no'} differences", *found, sep="\n  ", flush=True)
        num_differences += len(found)
    if num_differences:
        print(f"{name} does not fit. Add its rules to RULES in kv_pool/integrations/vllm/releases.py, and")
        print("for what else differs, compare the release as pool_classes.py beside it does.")
        sys.exit(1)
    if options.suites == "none":
        print(f"{name} fits as far as checked; it is added only after its own tests have run.")
    else:
        print(f"{name} fits: {record(level, options.version)}.")


if __name__ == "__main__":
    main()
