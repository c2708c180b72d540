"""Debian's Prometheus on a configuration in a folder, and the answers of its HTTP API."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager

import pytest
from events.peers.dynamo_indexer import find_free_port

BOUND_S = 60
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus on PATH")


def check(kind, path):
    """Check a file of rules, or a configuration, with promtool."""
    done = subprocess.run(["promtool", "check", kind, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running Prometheus.

    Args:
        port: of its HTTP API.
    """

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path, **arguments):
        """Return the `data` of an answer of the API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        """Return the values of a query by their labels; a value without data is left out."""
        found = self.get("query", query=expression)["result"]
        values = [(tuple(sorted(one["metric"].items())), float(one["value"][1])) for one in found]
        return {labels: value for labels, value in values if value == value}

    def wait_for(self, expression):
        """Return the values of a query once there is one."""
        deadline = time.monotonic() + BOUND_S
        while not (found := self.query(expression)):
            assert time.monotonic() < deadline, f"no data: {expression}"
            time.sleep(0.2)
        return found


@contextmanager
def running_prometheus(folder, configuration):
    """Write the text of a configuration into a folder and run Prometheus on it."""
    (folder / "prometheus.yml").write_text(configuration)
    check("config", folder / "prometheus.yml")
    port = find_free_port()
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *options], stderr=subprocess.PIPE, text=True)
    try:
        prometheus = Prometheus(port)
        deadline = time.monotonic() + BOUND_S
        while True:
            assert process.poll() is None, process.stderr.read()
            try:
                prometheus.get("status/buildinfo")
                break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield prometheus
    finally:
        process.terminate()
        process.communicate(timeout=BOUND_S)
