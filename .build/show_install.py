"""Run `pip install -v ARGUMENTS`; show a line for each stage and, on a terminal, a bar for the compilation.

    usage: show_install.py LOG ARGUMENTS...

LOG receives all that pip prints. If pip fails, its last lines are printed, and the exit status is pip's.
"""

import collections
import re
import subprocess
import sys
import time
from pathlib import Path

# What pip prints when a stage begins, and the line to show; `compile_core.py` prints those with "kv_pool: ".
STAGES = (
    (r"Installing build dependencies: started", "fetching hatchling and mypy, which build kv_pool"),
    (r"kv_pool: (?!compiled)(.*)", r"\1"),
    (r"kv_pool: compiled C file 1 of (\d+)", r"compiling \1 C files"),
    (r"Collecting .*\(from kv_pool", "fetching the packages that kv_pool uses"),
    (r"Installing collected packages: .*kv_pool", "installing the packages"),
)
COMPILED = re.compile(r"kv_pool: compiled C file (\d+) of (\d+)")
BAR_WIDTH = 40


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


def main(log: Path, arguments: list[str]) -> int:
    """Return pip's exit status."""
    display = Display()
    last = collections.deque[str](maxlen=30)
    log.parent.mkdir(parents=True, exist_ok=True)
    pip = subprocess.Popen(
        [sys.executable, "-m", "pip", "install", "-v", "--disable-pip-version-check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert pip.stdout is not None
    with pip, log.open("w", encoding="utf-8") as file:
        for line in pip.stdout:
            file.write(line)
            last.append(line)
            for pattern, stage in STAGES:
                if found := re.match(pattern, line.strip()):
                    display.show_stage(found.expand(stage))
            if compiled := COMPILED.match(line.strip()):
                display.show_bar(int(compiled[1]), int(compiled[2]))
    display.end_bar()
    if pip.returncode:
        print(*last, f"pip failed; all that it printed is in {log}\n", sep="", file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
