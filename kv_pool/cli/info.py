"""`kv-pool info` and `topology`: what is installed and configured here, and the devices of this machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.foreign_text import escape_lines, escape_text
from kv_pool.cli.setting_options import Json
from kv_pool.core.mode import COMPILED
from kv_pool.environment import VARIABLES, list_mistakes
from kv_pool.migration.machine import Accelerator, Machine, read_machine
from kv_pool.replay.tables import ReportTable
from kv_pool.version import __version__

_PACKAGES = ("msgspec", "xxhash", "numpy", "cbor2", "typer", "rich", "matplotlib", "backports.zstd", "pyzmq")


def info(json: Json = False) -> None:
    """Show whether the core runs compiled, the versions of dependencies, and the environment variables."""
    facts = {
        "kv_pool": __version__,
        "core": "compiled (mypyc)" if COMPILED else "plain Python",
        "installed in": str(Path(__file__).parent.parent),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
    }
    packages = {name: _find_version(name) for name in _PACKAGES}
    variables = {variable.name: os.environ.get(variable.name) for variable in VARIABLES}
    mistakes = list_mistakes()
    if json:
        print_json(facts | {"packages": packages, "environment": variables, "mistakes": mistakes})
        return
    known = [(name, value or "not installed") for name, value in {**facts, **packages}.items()]
    print_table(ReportTable(("", "value"), known, ("", "value"), has_titles=False))
    rows = [(one.name, variables[one.name], one.values, one.meaning) for one in VARIABLES]
    titles = ("variable", "set to", "values, default first", "meaning")
    print_table(ReportTable(titles, rows, titles))
    for mistake in mistakes:
        print(f"wrong setting: {escape_lines(mistake)}")


def _find_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def topology(json: Json = False) -> None:
    """Show the NUMA nodes and accelerators of this machine, and the links between them.

    A machine does not know its rack and network: set them in the file of kv-pool serve --config.
    """
    machine = read_machine()
    if json:
        print_json(machine)
    else:
        show_machine(machine)


def show_machine(machine: Machine) -> None:
    """Print a machine as text and tables."""
    print(f"host {escape_text(machine.host)}")
    if machine.numa_nodes:
        nodes = [
            (str(node.node_id), node.cpus, f"{node.memory_bytes / 2**30:.1f} GiB")
            for node in machine.numa_nodes
        ]
        titles = ("NUMA node", "processors", "memory")
        print_table(ReportTable(titles, nodes, titles[:2]), box=box.SIMPLE)
    else:
        print("the system reports no NUMA nodes")
    if not machine.accelerators:
        print("no accelerator")
        return
    columns = ("accelerator", "at", "NUMA node", "memory", "NVLinks")
    print_table(ReportTable(columns, [*map(_describe, machine.accelerators)], columns), box=box.SIMPLE)
    if not machine.has_nvml and any(device.name == "NVIDIA" for device in machine.accelerators):
        print("names, memory and links of NVIDIA's devices: pip install 'kv_pool[nvml]'")


def _describe(device: Accelerator) -> list[str]:
    links = ", ".join(f"{count} to {name}" for name, count in sorted(device.links.items()))
    memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    numa = "" if device.numa_node is None else str(device.numa_node)
    return [device.name, device.pci_address, numa, memory, links]
