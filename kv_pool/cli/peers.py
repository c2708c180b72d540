"""`kv-pool peers`: show the nodes that a running node knows, their nearness and their free blocks."""

from rich import box
from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.control.client import ControlClient


def peers(socket: Socket = None, node: Node = None, json: Json = False) -> None:
    """Show the other nodes that a running node knows."""
    with ControlClient(socket, node=node) as client:
        found = client.list_peers()
    if json:
        print_json(found)
        return
    others = "1 other node" if len(found.peers) == 1 else f"{len(found.peers)} other nodes"
    print(f"node {escape_text(found.name)} at {escape_text(found.address)} knows {others}")
    if not found.peers:
        return
    table = Table(box=box.SIMPLE)
    for title in ("node", "address", "nearness", "free blocks", "round trip"):
        table.add_column(
            title, justify="right" if title in ("free blocks", "round trip") else "left", no_wrap=True
        )
    for peer in found.peers:
        if peer.error:
            table.add_row(make_cell(peer.name), make_cell(peer.address), "no answer", "", "")
        else:
            table.add_row(
                make_cell(peer.name),
                make_cell(peer.address),
                make_cell(peer.nearness if peer.nearness == "elsewhere" else f"same {peer.nearness}"),
                f"{peer.num_free_blocks:,} of {peer.num_blocks:,}",
                f"{peer.round_trip_ms:.1f} ms",
            )
    print_table(table)
    for peer in found.peers:
        if peer.error:
            print(f"{escape_text(peer.name)}: {escape_text(peer.error)}")
