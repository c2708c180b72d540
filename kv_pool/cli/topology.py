"""`kv-pool topology`: show the NUMA nodes, accelerators and links of this machine."""

from rich import box
from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.migration.machine import Accelerator, Machine, read_machine


def topology(json: Json = False) -> None:
    """Show the NUMA nodes and accelerators of this machine, and the links between them.

    A machine does not know its rack and network: set them in the file of kv-pool serve --config.
    """
    machine = read_machine()
    if json:
        print_json(machine)
    else:
        show(machine)


def show(machine: Machine) -> None:
    """Print a machine as text and tables."""
    print(f"host {escape_text(machine.host)}")
    if machine.numa_nodes:
        table = Table(box=box.SIMPLE)
        for title in ("NUMA node", "processors", "memory"):
            table.add_column(title, justify="right" if title == "memory" else "left", no_wrap=True)
        for node in machine.numa_nodes:
            table.add_row(str(node.node_id), make_cell(node.cpus), f"{node.memory_bytes / 2**30:.1f} GiB")
        print_table(table)
    else:
        print("the system reports no NUMA nodes")
    if not machine.accelerators:
        print("no accelerator")
        return
    table = Table(box=box.SIMPLE)
    for title in ("accelerator", "at", "NUMA node", "memory", "NVLinks"):
        table.add_column(title, no_wrap=title != "NVLinks")
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
