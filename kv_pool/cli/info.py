"""`kv-pool info` and `topology`: what is installed and configured here, and the devices of this machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich import box

from kv_pool.cli.console import print_report
from kv_pool.cli.setting_options import AS_JSON, takes
from kv_pool.core.block import COMPILED
from kv_pool.environment import VARIABLES, list_mistakes
from kv_pool.lab.tables import Report, ReportTable
from kv_pool.migration.machine import Accelerator, Machine, read_machine
from kv_pool.option import setting
from kv_pool.version import __version__

_PACKAGES = ("msgspec", "xxhash", "numpy", "cbor2", "typer", "rich", "matplotlib", "backports.zstd", "pyzmq")


@takes()
def info(json: bool = setting(AS_JSON, default=False)) -> None:
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
    known = [(name, value or "not installed") for name, value in {**facts, **packages}.items()]
    rows = [(one.name, variables[one.name], one.values, one.meaning) for one in VARIABLES]
    titles = ("variable", "set to", "values, default first", "meaning")
    shown: list[ReportTable | str] = [
        ReportTable(("", "value"), known, ("", "value"), has_titles=False),
        ReportTable(titles, rows, titles),
        *(f"wrong setting: {mistake}" for mistake in mistakes),
    ]
    found = facts | {"packages": packages, "environment": variables, "mistakes": mistakes}
    print_report(Report(found, shown), json)


def _find_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@takes()
def topology(json: bool = setting(AS_JSON, default=False)) -> None:
    """Show the NUMA nodes and accelerators of this machine, and the links between them.

    A machine does not know its rack and network: set them in the file of kv-pool serve --config.
    """
    show_machine(read_machine(), json)


def show_machine(machine: Machine, json: bool = False) -> None:
    """Print a machine as text and tables, or as JSON."""
    shown: list[ReportTable | str] = [f"host {machine.host}"]
    if machine.numa_nodes:
        titles = ("NUMA node", "processors", "memory")
        nodes = [(node.node_id, node.cpus, _format_bytes(node.memory_bytes)) for node in machine.numa_nodes]
        shown.append(ReportTable(titles, nodes, titles[:2]))
    else:
        shown.append("the system reports no NUMA nodes")
    if machine.accelerators:
        columns = ("accelerator", "at", "NUMA node", "memory", "NVLinks")
        shown.append(ReportTable(columns, [*map(_describe, machine.accelerators)], columns))
    else:
        shown.append("no accelerator")
    if not machine.has_nvml and any(device.name == "NVIDIA" for device in machine.accelerators):
        shown.append("names, memory and links of NVIDIA's devices: pip install 'kv_pool[nvml]'")
    print_report(Report(machine, shown), json, box=box.SIMPLE)


def _describe(device: Accelerator) -> tuple[object, ...]:
    links = ", ".join(f"{count} to {name}" for name, count in sorted(device.links.items()))
    memory = _format_bytes(device.memory_bytes) if device.memory_bytes else None
    return device.name, device.pci_address, device.numa_node, memory, links


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
