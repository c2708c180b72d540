"""Measure the cost of the ownership checks, in % of each call. See benchmarks/README.md for the columns.

The package is built from copies, with and without the checks in the files of `core/` in STRIPPED_FILES.

Removed from the build *no checks*:
    - each `if` that only raises InvalidBlockError or only calls `check_ours`, and each other call of
      `check_ours`: a double free, a block of another pool, or a free, null, unqueued or cached block;
    - each `if` in a loop that only raises InvalidTypeError: a block id that is not an int, a hash that is not
      bytes;
    - the comparison of `ref_cnt` in `get_new_blocks`; vLLM also has it, as an assertion, but it counts here;
    - loops that are empty afterwards: the first loop of `evict_blocks`.

Kept in both builds: code that undoes a call, because an interrupt can end a call as well; the comparisons of
owners by which `free_blocks` sends a block to its own pool, which vLLM's callers need; checks for links that
are None, which the compiler needs to infer types; checks of other arguments, once per call; the checks in
`free_queue.py`, `hash_map.py` and `block.py`.
"""

import argparse
import ast
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import repeat
from pathlib import Path
from typing import Any

from bench_block_pool import BLOCK_SIZE, BenchRequest, describe_run, find_version, make_request, summarize

WITH, AGAIN, NO_CHECKS = "with checks", "with checks again", "no checks"
BUILDS = {WITH: WITH, AGAIN: WITH, NO_CHECKS: NO_CHECKS}
"""The compared names and their builds. The second run of one build shows the noise."""

PROJECT_DIR = Path(__file__).resolve().parent.parent
NEEDED_TO_BUILD = ("pyproject.toml", "README.md", "LICENSE", ".build", "kv_pool")
STRIPPED_FILES = (
    "kv_pool/core/taking.py",
    "kv_pool/core/references.py",
    "kv_pool/core/freeing.py",
    "kv_pool/core/caching.py",
    "kv_pool/core/prefix_keys.py",
    "kv_pool/core/id_swap.py",
    "kv_pool/core/resizing.py",
    "kv_pool/core/prefix_cache.py",
    "kv_pool/core/pool_core.py",
)

# Number of checks per function. Update it with the code; otherwise the script measures something else.
NUM_CHECKS = {
    "take_onto": 1,
    "take_listed": 1,
    "touch_onto": 2,
    "free_all": 1,
    "unpin_all": 2,
    "group_by_pool": 3,
    "evict_blocks": 1,
    "cache_full_blocks": 4,
    "cache_partial_block": 2,
    "add_key": 2,
    "insert_key": 1,
    "move_block_hashes": 4,
    "_maybe_evict_cached_block": 1,
    "swap_ids": 1,
    "remove_last": 1,
    "explain_holds": 1,
    "move_to_band": 1,
}

REQUEST_BLOCKS = 64
HIT_BLOCKS = 256
# Work per sample: well below a millisecond, less than the usual time slice of another process.
SAMPLE_BLOCKS = 1_024

Sample = Callable[[], dict[str, float]]
"""A function that runs once and returns ns per call, by row title."""


# ---- removing the checks -------------------------------------------------------------------------


def is_call_of(statement: ast.stmt, name: str) -> bool:
    """Return True if the statement is only a call of the function or method with this name."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    return (called.id if isinstance(called, ast.Name) else getattr(called, "attr", None)) == name


def is_raise_of(statement: ast.stmt, name: str) -> bool:
    if not isinstance(statement, ast.Raise) or not isinstance(statement.exc, ast.Call):
        return False
    return isinstance(statement.exc.func, ast.Name) and statement.exc.func.id == name


class Stripper(ast.NodeTransformer):
    """Removes statements from functions and counts them by the function's name."""

    def __init__(self) -> None:
        self.removed: Counter[str] = Counter()
        self.function = ""
        self.loop_depth = 0

    def count(self) -> None:
        self.removed[self.function] += 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if node.name in (
            "check_ours",
            "check_foreign_block",
            "raise_typed",
            "raise_not_queued",
            "raise_not_takeable",
            "check_takeable",
        ):  # called only in case of an error
            return node
        self.function = node.name
        return self.generic_visit(node)


class CheckStripper(Stripper):
    """Removes the checks, and the loops that contained nothing else."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt] | None:
        (first, *rest) = node.body
        is_check = not rest and (
            is_raise_of(first, "InvalidBlockError")
            or (self.loop_depth > 0 and is_raise_of(first, "InvalidTypeError"))
            or is_call_of(first, "check_ours")
            or is_call_of(first, "check_foreign_block")
            or (is_call_of(first, "raise_not_takeable") and "is None" not in ast.unparse(node.test))
        )
        if is_check:
            self.count()
            otherwise: Any = [self.visit(statement) for statement in node.orelse]
            if any(otherwise):
                raise RuntimeError(f"{self.function}: more than checks after `{ast.unparse(node.test)}`")
            return None
        # Remove the comparison and keep `block is None`, which mypyc needs to infer the type.
        if ast.unparse(node.test) == "block is None or block.ref_cnt != 0":
            self.count()
            return ast.parse("if block is None:\n    raise CorruptedPoolError('')").body[0]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if is_call_of(node, "check_ours"):
            self.count()
            return None
        return node

    def visit_For(self, node: ast.For) -> ast.AST | None:
        self.loop_depth += 1
        self.generic_visit(node)
        self.loop_depth -= 1
        return node if node.body else None

    def visit_Try(self, node: ast.Try) -> ast.AST | None:
        self.generic_visit(node)
        return node if node.body else None


def strip(directory: Path, stripper: Stripper, expected: dict[str, int]) -> None:
    """Rewrite the stripped files of the copy in `directory`.

    Raises:
        RuntimeError: the numbers of removed checks differ from the table.
    """
    for name in STRIPPED_FILES:
        path = directory / name
        tree = stripper.visit(ast.parse(path.read_text()))
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
    if stripper.removed != expected:
        names = sorted(stripper.removed.keys() | expected)
        different = [
            f"{name}: {stripper.removed[name]}, expected {expected.get(name, 0)}"
            for name in names
            if stripper.removed[name] != expected.get(name, 0)
        ]
        raise RuntimeError(f"{type(stripper).__name__} removed other checks ({'; '.join(different)})")


# ---- the builds ----------------------------------------------------------------------------------


def build(name: str, directory: Path, is_compiled: bool) -> Path:
    """Create this build in `directory`. Return the path to import it from."""
    source = directory / "source"
    source.mkdir(parents=True)
    for entry in NEEDED_TO_BUILD:
        path = PROJECT_DIR / entry
        if path.is_dir():
            shutil.copytree(path, source / entry, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / entry)
    if name != WITH:
        strip(source, CheckStripper(), NUM_CHECKS)
    if not is_compiled:
        return source
    print(f"compiling: {name}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(directory), str(source)]
    subprocess.run(command, check=True, env={**os.environ, "KV_POOL_BUILD": "compiled"})
    (wheel,) = directory.glob("*.whl")
    installed = directory / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return installed


# ---- measured in child processes -----------------------------------------------------------------


def time_calls(call: Callable[..., Any], *arguments: Iterable[Any]) -> tuple[float, list[Any]]:
    """Call it with the first items of all arguments, the second, ... Return ns per call, and the results."""
    start = time.perf_counter_ns()
    results = list(map(call, *arguments))
    elapsed = time.perf_counter_ns() - start
    return elapsed / len(results), results


def sample_take_and_free(pool: Any, take: int) -> Sample:
    rounds = SAMPLE_BLOCKS // take

    def sample() -> dict[str, float]:
        taking, taken = time_calls(pool.get_new_blocks, repeat(take, rounds))
        freeing, _ = time_calls(pool.free_blocks, taken)
        return {f"get_new_blocks: {take:,}": taking, f"free_blocks: {take:,} without hash": freeing}

    return sample


def sample_hits(pool: Any, rng: random.Random) -> Sample:
    requests = [make_request(rng, HIT_BLOCKS) for _ in range(SAMPLE_BLOCKS // HIT_BLOCKS)]
    for request in requests:
        blocks = pool.get_new_blocks(HIT_BLOCKS)
        pool.cache_full_blocks(request, blocks, 0, HIT_BLOCKS, BLOCK_SIZE, 0)
        pool.free_blocks(reversed(blocks))
    prefixes = [request.block_hashes for request in requests]
    all_hashes = [block_hash for prefix in prefixes for block_hash in prefix]

    def sample() -> dict[str, float]:
        one_found, _ = time_calls(pool.get_cached_block, all_hashes, repeat([0]))
        found, hits = time_calls(pool.find_cached_prefix, prefixes, repeat(HIT_BLOCKS))
        touched, _ = time_calls(pool.touch, hits)
        touched_again, _ = time_calls(pool.touch, hits)
        freed_once, _ = time_calls(pool.free_blocks, hits)
        freed, _ = time_calls(pool.free_blocks, [reversed(blocks) for blocks in hits])
        singles = [[block] for blocks in hits for block in blocks]
        one_touched, _ = time_calls(pool.touch, singles)
        one_freed, _ = time_calls(pool.free_blocks, reversed(singles))
        if len(singles) != SAMPLE_BLOCKS:
            raise RuntimeError(f"{len(singles)} blocks hit")
        return {
            "get_cached_block: 1 (no checks in there)": one_found,
            f"find_cached_prefix: {HIT_BLOCKS} (no checks in there)": found,
            "touch: 1 free": one_touched,
            f"touch: {HIT_BLOCKS} free": touched,
            f"touch: {HIT_BLOCKS} in use": touched_again,
            "free_blocks: 1 cached": one_freed,
            f"free_blocks: {HIT_BLOCKS} that stay in use": freed_once,
            f"free_blocks: {HIT_BLOCKS} cached, reversed()": freed,
        }

    return sample


def sample_keys(pool: Any, rng: random.Random) -> Sample:
    requests: list[BenchRequest] = [
        make_request(rng, REQUEST_BLOCKS) for _ in range(SAMPLE_BLOCKS // REQUEST_BLOCKS)
    ]
    num_requests = len(requests)

    def sample() -> dict[str, float]:
        tables = [pool.get_new_blocks(REQUEST_BLOCKS) for _ in requests]
        ids = [[block.block_id for block in table] for table in tables]
        size, group = repeat(BLOCK_SIZE), repeat(0)
        cached, _ = time_calls(
            pool.cache_full_blocks, requests, tables, repeat(0), repeat(REQUEST_BLOCKS), size, group
        )
        evicted, _ = time_calls(pool.evict_blocks, ids)
        not_evicted, _ = time_calls(pool.evict_blocks, ids)
        each_request = [request for request in requests for _ in range(REQUEST_BLOCKS)]
        each_table = [table for table in tables for _ in range(REQUEST_BLOCKS)]
        firsts = [*range(REQUEST_BLOCKS)] * num_requests
        ends = [first + 1 for first in firsts]
        one_cached, _ = time_calls(
            pool.cache_full_blocks, each_request, each_table, firsts, ends, size, group
        )
        for listed in ids:
            pool.evict_blocks(listed)
        blocks = [block for table in tables for block in table]
        num_tokens = [end * BLOCK_SIZE for end in ends]
        partial, _ = time_calls(pool.cache_partial_block, each_request, blocks, num_tokens, group, size)
        others = pool.get_new_blocks(len(blocks))
        moved, _ = time_calls(pool.move_block_hashes, blocks, others)
        if len(pool.cached_block_hash_to_block) != SAMPLE_BLOCKS:
            raise RuntimeError(f"{len(pool.cached_block_hash_to_block)} blocks are cached")
        pool.evict_blocks([block.block_id for block in others])
        pool.free_blocks(others)
        pool.free_blocks(blocks)
        return {
            "cache_full_blocks: 1": one_cached,
            f"cache_full_blocks: {REQUEST_BLOCKS}": cached,
            "cache_partial_block": partial,
            "move_block_hashes": moved,
            f"evict_blocks: {REQUEST_BLOCKS} cached": evicted,
            f"evict_blocks: {REQUEST_BLOCKS} without hash": not_evicted,
        }

    return sample


def sample_unpin(pool: Any) -> Sample:
    def ignore(block: Any) -> None:
        """Ignore the notification that the block is reused."""

    def sample() -> dict[str, float]:
        tables = [pool.get_new_blocks(REQUEST_BLOCKS) for _ in range(SAMPLE_BLOCKS // REQUEST_BLOCKS)]
        unpinned, _ = time_calls(pool.unpin_blocks, tables, repeat(ignore))
        return {f"unpin_blocks: {REQUEST_BLOCKS}": unpinned}

    return sample


def measure_build(num_samples: int, num_blocks: int) -> dict[str, Any]:
    """Measure the kv_pool that this process imports. Return the lower quartile of each row's samples."""
    import kv_pool
    from kv_pool.core import pool_core

    rng = random.Random(0)

    def make_pool() -> Any:
        return kv_pool.BlockPool(num_blocks, True, BLOCK_SIZE)

    samplers = [sample_take_and_free(make_pool(), take) for take in (1, 10, 100, 1_000)]
    samplers += [sample_hits(make_pool(), rng), sample_keys(make_pool(), rng), sample_unpin(make_pool())]
    samples: dict[str, list[float]] = {}
    gc.collect()
    gc.disable()
    for run in range(-1, num_samples):
        for sampler in samplers:
            for title, elapsed_ns in sampler().items():
                listed = samples.setdefault(title, [])
                if run >= 0:  # the first run is the warm-up
                    listed.append(elapsed_ns)
    quartiles = {
        title: statistics.quantiles(listed, n=4, method="inclusive")[0] for title, listed in samples.items()
    }
    pool = make_pool()
    try:
        pool.free_blocks([pool.blocks[1]])
        does_check = False
    except kv_pool.InvalidBlockError:
        does_check = True
    is_compiled = not str(pool_core.__file__).endswith(".py")
    return {"rows": quartiles, "does_check": does_check, "is_compiled": is_compiled, "file": kv_pool.__file__}


def run_build(name: str, path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return ns per call, by row, of the build at `path`, measured in a new process."""
    command = [sys.executable, __file__, "--child", "--samples", str(options.samples)]
    command += ["--blocks", str(options.blocks)]
    env = {**os.environ, "PYTHONPATH": str(path)}
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout)
    wanted = {"does_check": BUILDS[name] == WITH, "is_compiled": not options.quick}
    if any(answer[key] != value for key, value in wanted.items()):
        raise RuntimeError(f"{name}: { ({key: answer[key] for key in wanted}) }, expected {wanted}")
    if not Path(answer["file"]).is_relative_to(path):
        raise RuntimeError(f"{name}: imported another kv_pool")
    rows: dict[str, float] = answer["rows"]
    return rows


def measure(paths: dict[str, Path], options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return ns per call, by row and compared name, one figure per round."""
    rows: dict[str, dict[str, list[float]]] = {}
    names = list(BUILDS)
    for round_number in range(options.rounds):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            for title, elapsed_ns in run_build(name, paths[BUILDS[name]], options).items():
                rows.setdefault(title, {each: [] for each in names})[name].append(elapsed_ns)
    return rows


# ---- results -------------------------------------------------------------------------------------


def find_costs(figures: dict[str, list[float]], name: str) -> list[float]:
    """Return the additional time of a call with checks over `name`, in %, per round."""
    pairs = zip(figures[WITH], figures[name], strict=True)
    return [(with_checks / other - 1) * 100 for with_checks, other in pairs]


def print_rows(rows: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'':24}{'ns/call':>10}{'p10':>10}{'p90':>10}{'rounds':>8}{'checks cost':>14}{'p10':>8}{'p90':>8}")
    for title, figures in rows.items():
        print(title)
        for name, samples in figures.items():
            low, median, high = summarize(samples)
            shown = "".join(f"{figure:>10,.{1 if figure < 1_000 else 0}f}" for figure in (median, low, high))
            line = f"    {name:20}{shown}{len(samples):>8}"
            if name != WITH:
                low, median, high = summarize(find_costs(figures, name))
                line += f"{median:>+12.1f} %{low:>+8.1f}{high:>+8.1f}"
            print(line)


def find_compiler() -> str:
    """Return the first line of the version of the C compiler that setuptools calls."""
    command = os.environ.get("CC") or str(sysconfig.get_config_var("CC"))
    answer = subprocess.run([command.split()[0], "--version"], check=True, stdout=subprocess.PIPE, text=True)
    return answer.stdout.partition("\n")[0]


def write_json(path: Path, provenance: dict[str, Any], rows: dict[str, dict[str, list[float]]]) -> None:
    results = []
    for title, figures in rows.items():
        costs = {}
        for name in figures:
            if name != WITH:
                low, median, high = summarize(find_costs(figures, name))
                costs[name] = {"median": median, "p10": low, "p90": high}
        rounded = {name: [round(figure, 2) for figure in samples] for name, samples in figures.items()}
        results.append({"title": title, "unit": "ns/call", "cost_percent": costs, "samples": rounded})
    path.write_text(json.dumps({"provenance": provenance, "rows": results}, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="new processes of each build")
    parser.add_argument("--samples", type=int, default=40, help="samples of each row in one process")
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks of each pool")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and provenance to FILE")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke test: nothing is compiled, 2 rounds of 3 samples; its figures mean nothing",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.samples = 2, 3
    if options.rounds < 1 or options.samples < 2 or options.blocks <= 4 * SAMPLE_BLOCKS:
        parser.error(f"at least 1 round, 2 samples and more than {4 * SAMPLE_BLOCKS:,} blocks")
    return options


def main() -> None:
    options = parse_options()
    if options.child:
        print(json.dumps(measure_build(options.samples, options.blocks)))
        return
    provenance = describe_run(list(BUILDS))
    provenance["command"] = " ".join(["python", "benchmarks/bench_ownership_checks.py", *sys.argv[1:]])
    provenance["versions"] = {name: find_version(name) for name in ("mypy", "setuptools", "hatchling")}
    provenance["core"] = "plain Python" if options.quick else f"compiled with {find_compiler()}"
    for key, value in provenance.items():
        if isinstance(value, dict):
            value = ", ".join(f"{name} {number}" for name, number in value.items())
        print(f"{key:22}{', '.join(value) if isinstance(value, list) else value}")
    print(flush=True)
    with tempfile.TemporaryDirectory(prefix="kv_pool-checks-") as directory:
        paths = {
            name: build(name, Path(directory, str(number)), not options.quick)
            for number, name in enumerate(dict.fromkeys(BUILDS.values()))
        }
        rows = measure(paths, options)
    print_rows(rows)
    if options.json:
        write_json(options.json, provenance, rows)


if __name__ == "__main__":
    main()
