"""Signals end every long command at once, with the right status and without leftovers; real processes."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.running_commands import (
    BOUND_S,
    hearing_sighup,
    list_session,
    running,
    serving,
    wait_for_all,
    wait_until,
)
from lab.made_trace import record, write_trace

from kv_pool.cli.signals import GRACE_S

STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
SIZES = ("--block-size", "8", "--trace-block-size", "8")


@pytest.fixture
def folder(tmp_path):
    # Requests that run for hours on the trace clock.
    busy = [record(800, list(range(i, i + 100)), 300_000, 60_000 + 10 * i) for i in range(2_000)]
    write_trace(tmp_path / "busy.jsonl", busy)
    write_trace(tmp_path / "idle.jsonl", [record(8, [1], 1, 9_000_000)])
    return tmp_path


def count_cpu_ticks(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def is_computing(process, num_workers):
    """Return whether the workers compute: they have used half a second of CPU, more than imports take."""
    busy = [pid for pid in list_session(process.pid) if pid != process.pid and count_cpu_ticks(pid) > 60]
    return len(busy) >= num_workers


SWEEP = ("sweep", "busy.jsonl", *SIZES, "--blocks", "50000,60000,70000", "--clock", "trace", "--jobs", "2")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_to_a_sweep_ends_its_workers(folder, name):
    with running(folder, *SWEEP) as process:
        wait_until(lambda: is_computing(process, 2), process)
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, out, err) == (STATUS[name], "", "")
        wait_for_all(process)
    assert not (folder / "sweep.png").exists()


def test_ctrl_c_twice_in_a_sweep_prints_no_traceback(folder):
    with running(folder, *SWEEP) as process:
        wait_until(lambda: is_computing(process, 2), process)
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, err) == (130, "")
        wait_for_all(process)


def test_ctrl_c_while_workers_start_prints_no_traceback(folder):
    with running(folder, *SWEEP) as process:
        wait_until(lambda: len(list_session(process.pid)) > 1, process)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, err) == (130, "")
        wait_for_all(process)


def test_workers_of_a_killed_sweep_end(folder):
    with running(folder, *SWEEP) as process:
        wait_until(lambda: is_computing(process, 2), process)
        process.kill()
        wait_for_all(process)
        assert process.communicate(timeout=BOUND_S)[1] == ""


def test_killed_worker_is_reported_in_one_line(folder):
    with running(folder, *SWEEP) as process:
        wait_until(lambda: is_computing(process, 2), process)
        workers = sorted(list_session(process.pid), key=count_cpu_ticks)
        os.kill(next(pid for pid in reversed(workers) if pid != process.pid), signal.SIGKILL)
        out, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, out) == (2, "")
        assert err.startswith("error: a process of the sweep ended after 0 of 3 replays")
        assert len(err.splitlines()) == 1


LONG_COMMANDS = {
    "replay": ("replay", "busy.jsonl", *SIZES, "--blocks", "50000", "--clock", "trace"),
    "replay to readers": (
        "replay",
        "busy.jsonl",
        *SIZES,
        "--blocks",
        "900",
        "--publish",
        "tcp://127.0.0.1:0",
    ),
    "serve": ("serve", "idle.jsonl", *SIZES),
    "serve a node": ("serve", "idle.jsonl", *SIZES, "--name", "a", "--disk-tier", "tier"),
    "events": ("events", "ipc://nowhere"),
    "events mirror": ("events", "ipc://nowhere", "--mirror"),
}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("command", LONG_COMMANDS.values(), ids=LONG_COMMANDS)
def test_a_signal_ends_every_long_command(folder, command, name):
    if "--publish" in command:
        command = (*command, "--pace", "1")
    with running(folder, *command) as process:
        if command[0] == "serve" or "--publish" in command:
            process.stdout.readline()
        else:
            wait_until(lambda: has_handler(process.pid), process)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, err) == (STATUS[name], "")
        wait_for_all(process)


def has_handler(pid):
    """Return whether the process catches SIGTERM, which requires an installed handler."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
from kv_pool.cli.main import main
main()
"""


def test_ctrl_c_while_a_command_is_imported_prints_no_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT, "info"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_watch(folder, name):
    with (
        serving("idle.jsonl", *SIZES, "--name", "a", cwd=folder),
        running(folder, "migration-status", "--node", "a", "--watch") as process,
    ):
        wait_until(lambda: has_handler(process.pid), process)
        process.send_signal(getattr(signal, name))
        _, err = process.communicate(timeout=BOUND_S)
        assert (process.returncode, err) == (STATUS[name], "")


WILL_NOT_END = """
import threading, time
from kv_pool.cli.signals import end_on_signals
end_on_signals()
threading.Thread(target=time.sleep, args=(3600,)).start()
print("ready", flush=True)
try:
    time.sleep(3600)
finally:
    time.sleep(3600)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_stuck_command_is_terminated_within_a_second(name):
    """`GRACE_S` after the signal the process ends, whatever its cleanup and threads do."""
    command = [sys.executable, "-c", WILL_NOT_END]
    with hearing_sighup():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
    with process:
        assert process.stdout.readline() == "ready\n"
        sent = time.monotonic()
        process.send_signal(getattr(signal, name))
        try:
            assert process.wait(BOUND_S) == STATUS[name]
        finally:
            process.kill()
        assert GRACE_S <= time.monotonic() - sent < 10 * GRACE_S  # the margin is for a busy machine


def test_sighup_ignored_by_nohup_does_not_end_it(folder):
    ignoring = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-P", "-m", "kv_pool"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    with subprocess.Popen(
        [*ignoring, "serve", "idle.jsonl", *SIZES],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 143


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_ctrl_c_removes_the_bar_and_shows_the_cursor(folder, command):
    arguments = SWEEP if command == "sweep" else LONG_COMMANDS[command]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-P", "-m", "kv_pool", *arguments])
    shown = b""
    is_interrupted = False
    while True:
        assert select.select([terminal], [], [], BOUND_S)[0], shown
        try:
            shown += os.read(terminal, 10_000)
        except OSError:  # on Linux: no process has the terminal open any more
            break
        if not is_interrupted and shown.count(b"ing ") > 5:  # the bar was drawn several times
            is_interrupted = True
            os.write(terminal, b"\x03\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    last_bar = shown.rindex(b"ing ")
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.rindex(b"\x1b[2K") > last_bar
    assert b"Traceback" not in shown
