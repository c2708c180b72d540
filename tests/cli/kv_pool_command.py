"""Run `kv-pool` as a user does."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from kv_pool.control import ControlServer

TIMEOUT_S = 60


def kv_pool_command(*arguments, cwd, **variables):
    """Run it in its own process; stdout and stderr are text, wide enough that no line is folded."""
    environment = {**os.environ, "COLUMNS": "250", "PYTHONIOENCODING": "utf-8", **variables}
    if any(name.startswith("PYTHON") for name in variables):  # which Python reads when it starts
        return subprocess.run(
            [sys.executable, "-P", "-m", "kv_pool.cli.main", *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
    connection = start_forks()
    request = {"arguments": arguments, "folder": str(cwd), "environment": environment}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        socket.send_fds(connection, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
        child = int.from_bytes(connection.recv(8), "big")
        try:
            status = int.from_bytes(connection.recv(8), "big", signed=True)
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            connection.recv(8)
            raise
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode())
    return subprocess.CompletedProcess(["kv-pool", *arguments], status, *texts)


@cache
def start_forks():
    """Start the process that forks the commands, one per test process; it ends with the test process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("forked_commands.py"), str(theirs.fileno())],
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    ours.settimeout(TIMEOUT_S)
    atexit.register(process.wait)
    atexit.register(ours.close)  # and this one first
    return ours


def list_rows(text):
    """Return the cells of all rows of the tables in a command's output."""
    lines = [line for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]


def ask_pool(folder, pool, command, *options, status=0):
    """Serve a pool and run a command on it. Return its output, or its error if `status` is not 0."""
    with ControlServer(pool, folder / "here.sock"):
        done = kv_pool_command(command, "--socket", "here.sock", *options, cwd=folder)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout
