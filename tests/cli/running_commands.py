"""Runs commands in sessions of their own, and waits for them; nothing of them is left."""

import os
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

BOUND_S = 30


@contextmanager
def running(folder, *arguments, **options):
    """Run the command in its own session; kill what remains of the session at the end."""
    with hearing_sighup():
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kv_pool", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONIOENCODING": "utf-8", "XDG_RUNTIME_DIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
            **options,
        )
    try:
        yield process
    finally:
        for pid in list_session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=BOUND_S)


@contextmanager
def hearing_sighup():
    """Start children in this block: where nohup runs the tests, they would inherit that SIGHUP is ignored."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, earlier)


def list_session(session):
    """Return the processes of a session that still run, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_until(is_so, process):
    """Wait, up to a bound, until a condition holds; fail at once if the process prints an error."""
    deadline = os.times().elapsed + BOUND_S
    while not is_so():
        assert os.times().elapsed < deadline, "the wait was longer than its bound"
        if process.returncode is None:
            printed = select.select([process.stderr], [], [], 0.02)[0]
            assert not printed, os.read(process.stderr.fileno(), 10_000).decode()


def wait_for_all(process):
    """Wait, up to a bound, until no process of the session runs."""
    deadline = os.times().elapsed + BOUND_S
    while left := list_session(process.pid):
        assert os.times().elapsed < deadline, "a process of the session goes on"
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(left[0])], [], [], BOUND_S)


@contextmanager
def serving(*arguments, cwd):
    """Yield a `kv-pool serve` process once it has printed its `first_line`; kill it if it still runs."""
    with running(cwd, "serve", *arguments) as process:
        process.first_line = process.stdout.readline()
        yield process
