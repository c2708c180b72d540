"""Install kv_pool with an extra from this checkout, and show the stages and a bar for the compilation.

    usage: PYTHON .build/install.py EXTRA      PYTHON of the environment to install into

Two processes of pip run at the same time: one builds the wheel, the other installs what it requires. All that
they print is in `setup.log` in the environment; if one fails, its last lines are printed.
"""

import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# What pip prints when a stage begins, and the line to show; `compile_core.py` prints those with "kv_pool: ".
STAGES = (
    (r"Installing build dependencies: started", "fetching hatchling and mypy, which build kv_pool"),
    (r"kv_pool: (?!compiled)(.*)", r"\1"),
    (r"kv_pool: compiled C file 1 of (\d+)", r"compiling \1 C files"),
)
COMPILED = re.compile(r"kv_pool: compiled C file (\d+) of (\d+)")
BAR_WIDTH = 40
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-v")
LOG = Path(sys.prefix) / "setup.log"


class Display:
    """Prints stages and a bar to stderr."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.shown: set[str] = set()
        self.is_bar_open = False

    def show_stage(self, stage: str) -> None:
        """Print a stage with the seconds since the start, once."""
        if stage not in self.shown:
            self.shown.add(stage)
            self.end_bar()
            print(f"[{time.monotonic() - self.started:3.0f} s] {stage}", file=sys.stderr, flush=True)

    def show_bar(self, done: int, total: int) -> None:
        """Draw the bar over the one before; no-op if stderr is not a terminal."""
        if sys.stderr.isatty():
            filled = BAR_WIDTH * done // total
            bar = f"\r        [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done} of {total}"
            print(bar, end="", file=sys.stderr, flush=True)
            self.is_bar_open = True

    def end_bar(self) -> None:
        """Continue on a new line."""
        if self.is_bar_open:
            print(file=sys.stderr)
            self.is_bar_open = False


def list_requirements(extra: str) -> Iterator[str]:
    """Yield the requirements of kv_pool with an extra, and with the extras that this one includes.

    Raises:
        SystemExit: there is no such extra.
    """
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    if extra not in extras:
        sys.exit(f"there is no extra {extra!r}; pyproject.toml has {', '.join(extras)}")
    yield from project["dependencies"]
    waiting = [extra]
    for name in waiting:
        for requirement in extras[name]:
            if own := re.fullmatch(r"kv_pool\[(.*)\]", requirement):
                waiting += own[1].split(",")
            else:
                yield requirement


def run_pip(*arguments: str, display: Display | None = None) -> None:
    """Run pip, append its output to the log, and show the stages that it reports.

    Raises:
        SystemExit: pip failed; the last lines of its output have been printed.
    """
    pip = subprocess.Popen(
        [*PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert pip.stdout is not None
    lines = []
    with pip:
        for line in pip.stdout:
            lines.append(line)
            for pattern, stage in STAGES if display else ():
                if display and (found := re.match(pattern, line.strip())):
                    display.show_stage(found.expand(stage))
            if display and (compiled := COMPILED.match(line.strip())):
                display.show_bar(int(compiled[1]), int(compiled[2]))
    with LOG.open("a", encoding="utf-8") as log:
        log.writelines(lines)
    if pip.returncode:
        print("\n", *lines[-30:], f"pip failed; all that it printed is in {LOG}\n", sep="", file=sys.stderr)
        sys.exit(pip.returncode)


def main(extra: str) -> None:
    """Install kv_pool with this extra."""
    requirements = list(list_requirements(extra))
    display = Display()
    LOG.unlink(missing_ok=True)
    display.show_stage(
        f"installing {len(requirements)} requirements and what these require, beside the build"
    )
    with ThreadPoolExecutor(1) as threads, tempfile.TemporaryDirectory() as folder:
        required = threads.submit(run_pip, "install", *requirements)
        run_pip("wheel", "--no-deps", "--wheel-dir", folder, ".", display=display)
        display.end_bar()
        required.result()
        display.show_stage("installing kv_pool")
        [wheel] = Path(folder).iterdir()
        run_pip("install", "--no-deps", "--force-reinstall", str(wheel))


if __name__ == "__main__":
    main(sys.argv[1])
