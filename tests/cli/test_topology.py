"""`kv-pool topology`: NUMA nodes, accelerators and links."""

import json
import socket

from cli.kv_pool_command import kv_pool_command

from kv_pool.cli.info import show_machine
from kv_pool.migration.machine import Accelerator, Machine, NumaNode


def test_machine_is_shown_as_text_and_json(tmp_path):
    done = kv_pool_command("topology", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"host {socket.gethostname()}"
    found = json.loads(kv_pool_command("topology", "--json", cwd=tmp_path).stdout)
    assert found.keys() == {"host", "numa_nodes", "accelerators", "has_nvml"}
    assert found["host"] == socket.gethostname()


def test_nodes_accelerators_and_links_are_rows(capsys):
    gpu = Accelerator("0000:3b:00.0", 0, "NVIDIA H100", "GPU-0", 80 * 2**30, {"0000:af:00.0": 2, "switch": 4})
    show_machine(Machine("h1", [NumaNode(0, "0-31", 64 * 2**30)], [gpu], has_nvml=True))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", "0-31", "64.0", "GiB"] in lines
    gpu_line = next(" ".join(line) for line in lines if line[:1] == ["NVIDIA"])
    assert gpu_line == "NVIDIA H100 0000:3b:00.0 0 80.0 GiB 2 to 0000:af:00.0, 4 to switch"


def test_missing_nvml_output_says_how_to_install_it(capsys):
    show_machine(Machine("h1", [], [Accelerator("0000:3b:00.0", None, "NVIDIA")], has_nvml=False))
    shown = capsys.readouterr().out
    assert "the system reports no NUMA nodes" in shown
    assert "pip install 'kv_pool[nvml]'" in shown
    show_machine(Machine("h1", [], [], has_nvml=False))
    assert "no accelerator" in capsys.readouterr().out
