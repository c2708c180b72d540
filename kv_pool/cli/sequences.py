"""`kv-pool sequences`: what a running pool's blocks are held by."""

from rich import box
from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.control.client import ControlClient


def sequences(socket: Socket = None, node: Node = None, json: Json = False) -> None:
    """List the sequences of a running pool, those first that nobody has used for longest."""
    with ControlClient(socket, node=node) as client:
        found = client.list_sequences()
    if json:
        print_json(found)
        return
    table = Table(box=box.SIMPLE)
    for title in ("sequence", "blocks", "priority", "last used", ""):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for sequence in found.sequences:
        table.add_row(
            str(sequence.sequence_id),
            f"{sequence.num_blocks:,}",
            str(sequence.priority),
            f"{sequence.idle_s:.1f} s ago",
            "migrates" if sequence.is_migrating else "",
        )
    print_table(table)
