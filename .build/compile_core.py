"""Build hook: compile core and parts of other folders with mypyc into the wheel, or fall back to plain code.

The environment variable KV_POOL_BUILD decides, at build time only:
    auto (default)  compile; where that fails, for want of a C compiler say, build a plain wheel
    compiled        compile or fail
    plain           do not compile

The compiled files are kept in `build/compiled` of the checkout, so that a second installation from the same
sources takes seconds.
"""

import ast
import atexit
import hashlib
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# invariants.py is for people to read and tests to run, kv_events.py loses its msgspec options when
# compiled, block_pool.py has to stay an ordinary class (see there).
NOT_COMPILED = {"__init__.py", "invariants.py", "kv_events.py", "block_pool.py"}
CONTIGUOUS = (
    "buddy",
    "fragmentation",
    "run_index",
)
# What every event of a stream goes through, in a publisher and in a router; none may import zmq.
EVENTS = (
    "chains",
    "place_blocks",
    "publisher_blocks",
    "spans",
    "stream_state",
    "token_keys",
)
# What every request of a `GPUKVPool` goes through, together with `sequences/holdings`.
ADAPTER = ("allocation",)
# What every step of a scheduler goes through.
MANAGER = (
    "admission",
    "allocating",
    "block_copies",
    "block_groups/block_group",
    "block_groups/block_table",
    "block_groups/mamba_group",
    "block_groups/state_chains",
    "engine/engine_manager",
    "kv_cache_manager",
    "manager_state",
    "prefix_caching",
    "retention/block_retention",
    "retention/claims",
    "retention/directive",
    "sequences/holdings",
    "table_rows",
)


# With -Og, -O1 and -O3 gcc 12 takes 0.5, 1 and 1.6 times as long. Against -O1, -O3 saves a tenth of the time
# of hits, of taking blocks and of decode steps; -Og costs up to a tenth of the time that a module takes.
OPTIMIZATION = "1"
# Modules of which each step of a scheduler runs many lines.
HOT = (
    "core/block_keys",
    "core/caching",
    "core/evicting",
    "core/free_queue",
    "core/freeing",
    "core/hash_map",
    "core/pool_core",
    "core/taking",
    "contiguous/run_index",
    "manager/allocating",
    "manager/block_groups/block_group",
    "manager/block_groups/block_table",
    "manager/engine/engine_manager",
    "manager/kv_cache_manager",
    "manager/manager_state",
    "manager/prefix_caching",
    "manager/admission",
)
# Modules that run once for a pool or a request, or for what few requests do.
COLD = (
    "core/cache_policy",
    "core/deadlines",
    "core/holds",
    "core/id_swap",
    "core/live_curve",
    "core/policy_names",
    "core/pool_size",
    "core/pool_state",
    "core/repairing",
    "core/salt_regions",
    "core/sampled_stack",
    "contiguous/buddy",
    "manager/block_copies",
    "manager/block_groups/state_chains",
    "manager/retention/directive",
)
# C files by the beginning of their names: modules, flags (beside `OPTIMIZATION`), number of files.
LEVELS = {"hot": (HOT, ["-O3"], 5), "cold": (COLD, ["-Og"], 4)}
NUM_OTHER_FILES = 7
SHIMS_PER_FILE = 16

# Type errors are for the gate to find, with the project's own configuration, and modules that are only
# imported are not compiled: silent. The skipped packages do not build kv_pool: they may be missing here, or
# be in the middle of their installation into the same environment, when half of their types are there.
MYPY_CONFIG = """
[mypy]
ignore_missing_imports = true
follow_imports = silent

[mypy-numpy.*,ml_dtypes.*,zmq.*]
follow_imports = skip
follow_imports_for_stubs = true
"""


class CompileCore(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the compiled modules to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        mode = os.environ.get("KV_POOL_BUILD", "auto")
        if mode not in ("auto", "compiled", "plain"):
            raise ValueError(f"KV_POOL_BUILD is {mode!r}; it is auto, compiled or plain")
        self.build_dir = tempfile.mkdtemp(prefix="kv_pool-mypyc-")
        atexit.register(shutil.rmtree, self.build_dir, ignore_errors=True)  # a failed build has no `finalize`
        if self.target_name != "wheel" or version == "editable" or mode == "plain":
            return
        try:
            extensions = self.compile_core(Path(self.build_dir))
        except (Exception, SystemExit) as error:  # mypyc exits, setuptools raises
            if mode == "compiled":
                raise
            reason = "mypyc has printed why, see setup.log" if isinstance(error, SystemExit) else error
            report(f"the core is not compiled and runs as plain Python: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(extensions)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self.build_dir, ignore_errors=True)

    def compile_core(self, build_dir: Path) -> dict[str, str]:
        """Compile, or reuse an earlier result. Return the files and their places in the wheel."""
        kept = Path(self.root) / "build" / "compiled"
        libraries = kept / digest_sources(Path(self.root))
        if libraries.is_dir():
            report("building from the compiled files of an earlier installation")
        else:
            self._compile(build_dir)
            try:
                shutil.rmtree(kept, ignore_errors=True)  # of other sources
                kept.mkdir(parents=True)
                unfinished = kept / build_dir.name
                shutil.copytree(build_dir / "lib", unfinished)
                unfinished.rename(libraries)
            except OSError:  # the checkout cannot be written, or another build was faster
                libraries = build_dir / "lib"
        built = libraries.rglob("*.*")
        return {str(path): str(path.relative_to(libraries)) for path in built if path.is_file()}

    def _compile(self, build_dir: Path) -> None:
        from mypyc.build import mypycify
        from setuptools import Distribution

        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "")
        if compiler and shutil.which(compiler[0]) is None:
            raise FileNotFoundError(f"there is no C compiler ({compiler[0]})")
        before = os.getcwd()
        os.chdir(self.root)  # module names come from paths relative to here
        try:
            paths = [
                str(path)
                for folder in ("core", "policies")
                for path in sorted(Path("kv_pool", folder).glob("*.py"))
                if path.name not in NOT_COMPILED
            ]
            paths += [f"kv_pool/adapter/{name}.py" for name in ADAPTER]
            paths += [f"kv_pool/contiguous/{name}.py" for name in CONTIGUOUS]
            paths += [f"kv_pool/events/{name}.py" for name in EVENTS]
            paths += [f"kv_pool/manager/{name}.py" for name in MANAGER]
            config = build_dir / "mypy.ini"
            config.write_text(MYPY_CONFIG)
            options = [f"--config-file={config}", f"--cache-dir={os.devnull}"]
            report(f"translating {len(paths)} modules to C with mypyc")
            c_dir = build_dir / "c"
            shared, *shims = mypycify(
                [*options, *paths],
                opt_level=OPTIMIZATION,
                debug_level="0",
                multi_file=True,
                group_name="kv_pool",
                target_dir=str(c_dir),
            )
            for path in paths:
                finish_c_code(c_dir, path)
            shared.sources = group_c_files(c_dir, shared.sources)
            shim_groups = group_shims(c_dir, shims)
            command = Distribution({"name": "kv_pool"}).get_command_obj("build_ext")
            command.distribution.ext_modules = [shared, *(group[0] for group in shim_groups)]
            command.build_lib = str(build_dir / "lib")
            command.build_temp = str(build_dir / "temp")
            command.build_extensions = lambda: build_in_parallel(command)
            command.ensure_finalized()
            command.run()
            for first, *others in shim_groups:
                for shim in others:
                    place = command.get_ext_fullpath(shim.name)
                    os.makedirs(os.path.dirname(place), exist_ok=True)
                    shutil.copyfile(command.get_ext_fullpath(first.name), place)
        finally:
            os.chdir(before)


def report(stage: str) -> None:
    """Print a stage of the build. pip shows it with -v only; `show_install.py` reads it."""
    print(f"kv_pool: {stage}", flush=True)


def digest_sources(root: Path) -> str:
    """Return a name for everything that decides what the compiler makes: sources, hook, Python, flags."""
    from mypy.version import __version__ as mypy_version

    digest = hashlib.sha256(f"{sys.version} {sysconfig.get_config_var('EXT_SUFFIX')} {mypy_version}".encode())
    for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS"):
        digest.update(f"{name}={os.environ.get(name)}".encode())
    for path in sorted([*(root / ".build").glob("*.*"), *(root / "kv_pool").rglob("*.py")]):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


# The patterns begin at a word: without `\b` each character of a name is tried, which takes ten seconds.
# At the top of each of mypyc's C files.
INCLUDES = r'(#include "__native_internal_kv_pool.h"\n)'
# In the definition of each module.
MODULE_DOCSTRING = r'("{name}",\s+)NULL(, /\* docstring \*/)'
# Where the code of a module has run.
MODULE_RAN = r"char result = (CPyDef_(\w+)_____top_level__)\(\);"
DOCUMENT = r"""char result = \1();
    if (result != 2 && KVPool_Document(CPyStatic_\2___globals) < 0)
        result = 2;"""
# Where a call from Python brings something else than an int.
NO_INT = (
    r"\b(\w+) = CPyTagged_BorrowFromObject\((obj_(\w+))\);\s+"
    r'else \{\s+CPy_TypeError\("int", \2\); goto fail;'
)
TAKE_INT = r"""\1 = CPyTagged_BorrowFromObject(\2);
    else {
        int is_wrong;
        \1 = KVPool_TakeInt("\3", \2, &is_wrong);
        if (is_wrong) goto fail;"""

# Where a declared int, which compiled code need not look at, is made an object to be looked at.
CHECK_INT = r"\b(\w+) = CPyTagged_StealAsObject\(\w+\);\s+(\w+) = PyLong_Check\(\1\);"
CHECK_COPY = r"CPyTagged_INCREF\(\w+\);\s+" + CHECK_INT + r"\s+CPy_DECREF\(\1\);"


def finish_c_code(folder: Path, source: str) -> None:
    """Make a module's C file, as mypyc wrote it, use `python_surface.h`, and give the module its docstring.

    Raises:
        ValueError: mypyc's output does not look as expected.
    """
    module = source.removesuffix(".py").replace("/", ".")
    path = folder / f"__native_{module.replace('.', '___')}.c"
    docstring = ast.get_docstring(ast.parse(Path(source).read_text()), clean=False) or ""
    text = "".join(f"\\\\{byte:03o}" for byte in docstring.encode())  # any C compiler reads octal bytes
    code = path.read_text()
    code = substitute(INCLUDES, r'\1#include "python_surface.h"\n', code, 1)
    code = substitute(MODULE_DOCSTRING.format(name=re.escape(module)), rf'\1"{text}"\2', code, 1)
    code = substitute(MODULE_RAN, DOCUMENT, code, 1)
    code = substitute(NO_INT, TAKE_INT, code, code.count('CPy_TypeError("int", obj_'))
    code = substitute(CHECK_COPY, r"\2 = 1;", code, len(re.findall(CHECK_INT, code)))
    path.write_text(code)


def substitute(pattern: str, replacement: str | Callable[[re.Match[str]], str], code: str, count: int) -> str:
    """Replace a pattern that must occur `count` times."""
    code, num_replaced = re.subn(pattern, replacement, code)
    if num_replaced != count:
        raise ValueError(f"mypyc's C code has {num_replaced} places for {pattern}, not {count}")
    return code


def group_c_files(folder: Path, sources: list[str]) -> list[str]:
    """Join the modules' C files into a few of about one size for each level, and mypyc's runtime into one.

    Each compilation reads megabytes of headers, so one for each file costs a quarter more. Compilations that
    are much longer than others leave cores idle.
    """
    shutil.copy(".build/python_surface.h", folder)
    shutil.copy(".build/python_surface.c", folder)
    modules = {Path(source) for source in sources if Path(source).name.startswith("__native_kv_pool___")}
    groups = {"runtime": [Path(source) for source in sources if not Path(source).name.startswith("__native")]}
    for level, (names, _, num_files) in LEVELS.items():
        paths = {folder / f"__native_kv_pool___{name.replace('/', '___')}.c" for name in names}
        if not paths <= modules:
            raise ValueError(f"not compiled: {', '.join(sorted(path.name for path in paths - modules))}")
        modules -= paths
        for number, group in enumerate(split_evenly(paths, num_files)):
            groups[f"{level}_{number}"] = group
    for number, group in enumerate(split_evenly(modules, NUM_OTHER_FILES)):
        groups[f"other_{number}"] = group
    grouped = [folder / "__native_kv_pool.c", folder / "python_surface.c"]
    for name, group in groups.items():
        grouped.append(folder / f"{name}.c")
        grouped[-1].write_text("".join(f'#include "{path.name}"\n' for path in group))
    return [str(path) for path in grouped]


def split_evenly(paths: set[Path], num_groups: int) -> list[list[Path]]:
    """Divide files into groups of about the same number of bytes."""
    groups: list[list[Path]] = [[] for _ in range(num_groups)]
    sizes = [0] * num_groups
    for path in sorted(paths, key=lambda path: (-path.stat().st_size, path)):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(path)
        sizes[smallest] += path.stat().st_size
    return groups


def group_shims(folder: Path, shims: list[Any]) -> list[list[Any]]:
    """Return the shims in groups, the first of each with the code of all; mypyc makes one for each module.

    A shim is a library with one function, `PyInit_` and the last part of the module's name, which fetches the
    module from the shared library. A library with the functions of several modules serves each of them under
    its name, and takes one compilation. Modules with the same last part are in different groups.
    """
    groups: list[dict[str, Any]] = []
    for shim in shims:
        name = shim.name.rpartition(".")[2]
        free = (group for group in groups if name not in group and len(group) < SHIMS_PER_FILE)
        group = next(free, None)
        if group is None:
            groups.append(group := {})
        group[name] = shim
    for number, group in enumerate(groups):
        source = folder / f"shims_{number}.c"
        source.write_text(
            "".join(
                f'#define PyInit___init__ PyInit___init___{name}\n#include "{shim.sources[0]}"\n'
                "#undef PyInit___init__\n"
                for name, shim in group.items()
            )
        )
        next(iter(group.values())).sources = [str(source)]
    return [list(group.values()) for group in groups]


def build_in_parallel(command: Any) -> None:
    """Compile the C files of all extensions of a `build_ext`, one on each core, and link them.

    A file whose compilation fails is compiled once more, when no other is.
    """
    jobs = [(extension, source) for extension in command.extensions for source in extension.sources]

    def compile_one(extension: Any, source: str) -> None:
        level = Path(source).name.partition("_")[0]
        flags = LEVELS[level][1] if level in LEVELS and command.compiler.compiler_type == "unix" else []
        extension.extra_objects += command.compiler.compile(
            [source],
            output_dir=command.build_temp,
            include_dirs=extension.include_dirs,
            extra_postargs=[*extension.extra_compile_args, *flags],
        )

    for extension in command.extensions:
        extension.sources = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads:
        running = {threads.submit(compile_one, *job): job for job in jobs}
        for number, _ in enumerate(as_completed(running), 1):
            report(f"compiled C file {number} of {len(jobs)}")
    # Several compilers at a time can be too many for the machine's memory.
    for done, job in running.items():
        if done.exception():
            report(f"compiling {Path(job[1]).name} again, alone")
            compile_one(*job)
    for extension in command.extensions:
        extension.extra_objects.sort()
        command.build_extension(extension)
