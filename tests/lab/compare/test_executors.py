"""Comparisons on real local clusters of Dask and Ray, started as programs; addresses that are none."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from types import ModuleType

import pytest
from lab.compare.made_comparison import MINE, write_random_trace

from kv_pool import InvalidArgumentError
from kv_pool.errors import MissingDependencyError, WorkerLostError
from kv_pool.lab.worker_processes import WorkerProcesses, open_executor

TIMEOUT_S = 200

# Scripts of these packages, run without their commands on PATH.
DASK = """
import sys
from distributed import LocalCluster

if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        print(cluster.scheduler_address.removeprefix("tcp://"), flush=True)
        sys.stdin.read()
"""
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]


@contextmanager
def dask_cluster(folder):
    """Start a scheduler and two worker processes in `folder`. Yield the address."""
    (folder / "cluster.py").write_text(DASK)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "cluster.py"], cwd=folder, **pipes) as process:
        yield f"dask://{process.stdout.readline().strip()}"
        process.stdin.close()
        process.stdout.read()


@contextmanager
def ray_cluster(folder):
    """Start a node of one CPU in `folder`, with a Ray Client server. Yield its address."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(str(server.getsockname()[1]))
    with tempfile.TemporaryDirectory(prefix="kv") as short:  # its sockets need short paths
        options = f"--head --block --num-cpus 1 --include-dashboard false --temp-dir {short}".split()
        options += ["--disable-usage-stats", "--port", ports[0], "--ray-client-server-port", ports[1]]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*RAY, "start", *options], cwd=folder, **quiet)
        try:
            yield f"ray://127.0.0.1:{ports[1]}"
        finally:
            process.terminate()
            process.wait()


CLUSTERS = {"dask": dask_cluster, "ray": ray_cluster}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    write_random_trace(tmp_path / "trace.jsonl", 3)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def compare(folder, *options):
    """Run the comparison. Return its exit status and the rows in its JSON, without durations."""
    text = "-m kv_pool compare trace.jsonl --policies sieve,mine.py:Mine,mine.py:Broken --blocks 12,30"
    text += " --trace-block-size 8 --json c.json --png c.png"
    command = [sys.executable, *text.split(), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S)
    assert "mine.py:Broken is broken: freed() raised ValueError" in done.stderr, done.stderr
    found = json.loads((folder / "c.json").read_text())
    rows = found["traces"][0]["rows"]
    for row in rows:
        row["seconds"] = None
    return done.returncode, rows


@pytest.mark.dask
def test_comparison_on_a_dask_cluster(folder):
    check_cluster(folder, "dask")


@pytest.mark.ray
def test_comparison_on_a_ray_cluster(folder):
    check_cluster(folder, "ray")


def check_cluster(folder, kind):
    """The results are those of local processes; the workers run in another folder, without the policy."""
    expected = compare(folder, "--jobs", "1")
    with CLUSTERS[kind](folder / "elsewhere") as address:
        assert compare(folder, "--on", address) == expected
    assert expected[0] == 2
    assert len(expected[1]) == 11


@pytest.mark.parametrize(("kind", "module"), [("dask", "distributed"), ("ray", "ray")])
@pytest.mark.parametrize("port", ["1", "http"], ids=["nothing listens", "no number"])
def test_without_a_cluster_there_is_one_error(monkeypatch, kind, module, port):
    """The client of the cluster, which would try again for seconds, is not asked."""
    package = ModuleType(module)
    package.Client = package.init = None
    monkeypatch.setitem(sys.modules, module, package)
    with pytest.raises(
        WorkerLostError, match=rf"no (Dask scheduler|Ray cluster) answers at 127\.0\.0\.1:{port}"
    ):
        open_executor(f"{kind}://127.0.0.1:{port}", 1).__enter__()


@pytest.mark.parametrize("address", ["", "dask", "dask://host", "tcp://host:1", "ray:host:1"])
def test_other_addresses_are_refused(address):
    with pytest.raises(InvalidArgumentError, match="is not an address such as dask://HOST:8786 or ray://"):
        open_executor(address, 1).__enter__()


@pytest.mark.parametrize(("kind", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_missing_packages_are_named(monkeypatch, kind, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=rf"{kind}:// needs .*pip install '\.\[{kind}\]'"):
        open_executor(f"{kind}://127.0.0.1:1", 1).__enter__()


def test_without_an_address_processes_are_local():
    with open_executor(None, 1) as executor:
        assert isinstance(executor, WorkerProcesses)
        assert executor.submit(os.getpid).result() != os.getpid()
