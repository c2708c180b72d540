"""`kv-pool info` and `topology`: what is installed and configured here, and the devices of this machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box

from kv_pool.cli.console import new_table, print_json, print_table
from kv_pool.cli.foreign_text import escape_lines, escape_text, make_cell
from kv_pool.cli.setting_options import Json
from kv_pool.core.mode import COMPILED
from kv_pool.environment import VARIABLES, list_mistakes
from kv_pool.migration.machine import Accelerator, Machine, read_machine
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
    table = new_table(("", ""), show_header=False)
    for name, value in {**facts, **packages}.items():
        table.add_row(name, make_cell(value or "not installed"))
    print_table(table)
    table = new_table(("variable", "set to", "values, default first", "meaning"), folds=("meaning",))
    for variable in VARIABLES:
        given = make_cell(variables[variable.name] or "")
        table.add_row(variable.name, given, variable.values, variable.meaning)
    print_table(table)
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
        table = new_table(("NUMA node", "processors", "memory"), right=("memory",), box=box.SIMPLE)
        for node in machine.numa_nodes:
            table.add_row(str(node.node_id), make_cell(node.cpus), f"{node.memory_bytes / 2**30:.1f} GiB")
        print_table(table)
    else:
        print("the system reports no NUMA nodes")
    if not machine.accelerators:
        print("no accelerator")
        return
    titles = ("accelerator", "at", "NUMA node", "memory", "NVLinks")
    table = new_table(titles, folds=("NVLinks",), box=box.SIMPLE)
    for device in machine.accelerators:
        table.add_row(*map(make_cell, _describe(device)))
    print_table(table)
    if not machine.has_nvml and any(device.name == "NVIDIA" for device in machine.accelerators):
        print("names, memory and links of NVIDIA's devices: pip install 'kv_pool[nvml]'")


def _describe(device: Accelerator) -> list[str]:
    links = ", ".join(f"{count} to {name}" for name, count in sorted(device.links.items()))
    memory = f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else ""
    numa = "" if device.numa_node is None else str(device.numa_node)
    return [device.name, device.pci_address, numa, memory, links]
