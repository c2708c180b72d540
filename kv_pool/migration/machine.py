"""`read_machine`: NUMA nodes, accelerators and their links, as the system and the driver report them."""

from __future__ import annotations

import os
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x1200")
"""PCI classes: VGA controller, 3D controller, processing accelerator."""
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_MAX_NVLINKS = 36


class NumaNode(msgspec.Struct, frozen=True):
    """A NUMA node: memory and the processors nearest to it.

    Attributes:
        cpus: in Linux's list format, `0-15,32-47`.
        memory_bytes: 0 if unknown.
    """

    node_id: int
    cpus: str
    memory_bytes: int


class Accelerator(msgspec.Struct, frozen=True):
    """A GPU or another accelerator.

    Attributes:
        pci_address: `0000:3b:00.0`.
        numa_node: the nearest NUMA node; None if unknown.
        name: the model's name from NVML, else the vendor's name.
        uuid, memory_bytes: from NVML; "" and 0 without it.
        links: number of NVLinks by the PCI address of the other accelerator, or `switch`.
    """

    pci_address: str
    numa_node: int | None
    name: str
    uuid: str = ""
    memory_bytes: int = 0
    links: dict[str, int] = {}


class Machine(msgspec.Struct, frozen=True):
    """A description of this machine. Its rack and network must be configured by the operator.

    Attributes:
        host: the host name.
        has_nvml: whether NVML was available.
    """

    host: str
    numa_nodes: list[NumaNode]
    accelerators: list[Accelerator]
    has_nvml: bool

    def name_memory(self, cpus: set[int]) -> str:
        """Return a name such as `numa1` if all `cpus` belong to one of several NUMA nodes; else ""."""
        homes = {node.node_id for node in self.numa_nodes if cpus & set(_read_cpus(node.cpus))}
        return f"numa{homes.pop()}" if len(homes) == 1 and len(self.numa_nodes) > 1 else ""


def read_machine(sysfs: str | Path = "/sys", nvml: Any = None) -> Machine:
    """Return the NUMA nodes and accelerators of this machine. Unknown values are left out.

    Args:
        sysfs: the mount point of sysfs.
        nvml: a module with NVML's functions; None for `pynvml`, if it is installed and finds a driver.
    Cost: reads some small files; with NVML, one call for each possible link.
    """
    devices = Path(sysfs) / "bus" / "pci" / "devices"
    found = {device.pci_address: device for device in _list_pci(devices)}
    library = _load_nvml() if nvml is None else nvml
    if library is not None:
        for device in _list_nvml(library):
            known = found.get(device.pci_address)
            numa_node = None if known is None else known.numa_node
            found[device.pci_address] = msgspec.structs.replace(device, numa_node=numa_node)
    nodes = _list_numa(Path(sysfs) / "devices" / "system" / "node")
    accelerators = [found[address] for address in sorted(found)]
    return Machine(socket.gethostname(), list(nodes), accelerators, library is not None)


def name_device(storage_device: str, machine: Machine) -> str:
    """Return the `NodeLocation.device` of a storage's device.

    Returns:
        For host memory, the NUMA node if this process is bound to one of several; for a CUDA device of torch,
        the GPU's UUID; "" if unknown.
    """
    if storage_device == "cpu":
        return machine.name_memory(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set())
    if not storage_device.startswith("cuda"):
        return ""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(storage_device), "uuid", None)
    return "" if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"


def _read(path: Path) -> str:
    """Return the text of a small file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _read_cpus(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as `0-3,8`."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            yield from range(int(first), int(last if last.isdigit() else first) + 1)


def _list_numa(folder: Path) -> Iterator[NumaNode]:
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        memory = re.search(r"MemTotal: *([0-9]+) kB", _read(path / "meminfo"))
        kilobytes = int(memory[1]) if memory else 0
        yield NumaNode(int(path.name.removeprefix("node")), _read(path / "cpulist"), kilobytes * 1024)


def _list_pci(folder: Path) -> Iterator[Accelerator]:
    for path in sorted(folder.glob("*")):
        vendor = _VENDORS.get(_read(path / "vendor"))
        if vendor is not None and _read(path / "class").startswith(_DISPLAY_CLASSES):
            numa = _read(path / "numa_node")
            yield Accelerator(path.name.lower(), int(numa) if numa.isdigit() else None, vendor)


def _load_nvml() -> Any:
    """Return `pynvml`, initialized; None if it is not installed or finds no driver."""
    try:
        library = import_module("pynvml")
        library.nvmlInit()
    except Exception:  # the error type for a missing driver differs between machines
        return None
    return library


def _list_nvml(nvml: Any) -> Iterator[Accelerator]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        yield Accelerator(
            _to_address(nvml.nvmlDeviceGetPciInfo(handle).busId),
            None,
            _to_text(nvml.nvmlDeviceGetName(handle)),
            _to_text(nvml.nvmlDeviceGetUUID(handle)),
            int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            dict(Counter(_list_links(nvml, handle))),
        )


def _list_links(nvml: Any, handle: Any) -> Iterator[str]:
    """Yield the other end of each NVLink of a device."""
    for link in range(_MAX_NVLINKS):
        with suppress(nvml.NVMLError):  # the device does not have this link
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                is_gpu = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == 0
                remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link) if is_gpu else None
                yield "switch" if remote is None else _to_address(remote.busId)


def _to_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _to_address(bus_id: str | bytes) -> str:
    """Convert NVML's `00000000:3B:00.0` to Linux's format, `0000:3b:00.0`."""
    return _to_text(bus_id).lower()[-12:]
