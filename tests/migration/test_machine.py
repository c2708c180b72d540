"""Tests of `read_machine` with a folder in sysfs format and a fake NVML module."""

# ruff: noqa: N802 (the names are NVML's)

from types import SimpleNamespace

import pytest

from kv_pool.migration.machine import Accelerator, NumaNode, name_device, read_machine


@pytest.fixture
def sysfs(tmp_path):
    """Create two NUMA nodes with one GPU each, and a network card."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for node, cpus in ((0, "0-3,8"), (1, "4-7")):
        folder = f"devices/system/node/node{node}"
        write(f"{folder}/cpulist", cpus + "\n")
        write(
            f"{folder}/meminfo", f"Node {node} MemTotal:       {1024 + node} kB\nNode {node} MemFree: 3 kB\n"
        )
    for address, vendor, kind, node in (
        ("0000:3b:00.0", "0x10de", "0x030200", "0"),
        ("0000:af:00.0", "0x10de", "0x030200", "1"),
        ("0000:00:1f.0", "0x8086", "0x020000", "0"),
        ("0000:c1:00.0", "0x1002", "0x120000", "-1"),
    ):
        folder = f"bus/pci/devices/{address}"
        write(f"{folder}/vendor", vendor + "\n")
        write(f"{folder}/class", kind + "\n")
        write(f"{folder}/numa_node", node + "\n")
    return tmp_path


class MadeNvml:
    """The functions of `pynvml` in use: two GPUs, two links between them, one link to a switch."""

    class NVMLError(Exception):
        pass

    addresses = (b"00000000:3B:00.0", b"00000000:AF:00.0")

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(busId=self.addresses[handle])

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H100" if handle else b"NVIDIA H100"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link > 3:
            raise self.NVMLError
        return link != 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle, link):
        return 2 if link == 3 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):
        return SimpleNamespace(busId=self.addresses[1 - handle])


def test_numa_nodes_and_accelerators_are_read(sysfs):
    machine = read_machine(sysfs, MadeNvml())
    assert machine.host
    assert machine.has_nvml
    assert machine.numa_nodes == [NumaNode(0, "0-3,8", 1024 * 1024), NumaNode(1, "4-7", 1025 * 1024)]
    there, here = ({f"0000:{bus}:00.0": 2, "switch": 1} for bus in ("af", "3b"))
    assert machine.accelerators == [
        Accelerator("0000:3b:00.0", 0, "NVIDIA H100", "GPU-0", 80 * 2**30, there),
        Accelerator("0000:af:00.0", 1, "NVIDIA H100", "GPU-1", 80 * 2**30, here),
        Accelerator("0000:c1:00.0", None, "AMD"),
    ]


def test_without_nvml_sysfs_names_the_vendors(sysfs, monkeypatch):
    monkeypatch.setattr(MadeNvml, "nvmlDeviceGetCount", lambda self: 0)
    found = read_machine(sysfs, MadeNvml()).accelerators
    assert [(one.numa_node, one.name) for one in found] == [(0, "NVIDIA"), (1, "NVIDIA"), (None, "AMD")]


def test_host_memory_is_named_after_one_of_several_numa_nodes(sysfs):
    machine = read_machine(sysfs, MadeNvml())
    sets = ({1, 8}, {5}, {3, 4}, set())
    assert [machine.name_memory(cpus) for cpus in sets] == ["numa0", "numa1", "", ""]
    assert name_device("meta", machine) == ""
    for name in ("cpulist", "meminfo"):
        (sysfs / "devices/system/node/node1" / name).unlink()
    assert read_machine(sysfs, MadeNvml()).numa_nodes[1] == NumaNode(1, "", 0)
    (sysfs / "devices/system/node/node1").rmdir()
    assert read_machine(sysfs, MadeNvml()).name_memory({0, 1}) == ""
    empty = read_machine(sysfs / "missing", MadeNvml())
    assert (empty.numa_nodes, len(empty.accelerators)) == ([], 2)


def test_this_machine_can_be_read():
    machine = read_machine()
    assert machine.host
    assert name_device("cpu", machine) in ("", *(f"numa{node.node_id}" for node in machine.numa_nodes))


@pytest.mark.gpu
def test_a_gpu_is_named_after_its_uuid():
    assert name_device("cuda:0", read_machine()).startswith("GPU-")
