"""`kv-pool tiers`: what the tiers below a running pool hold, and what came back from them."""

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.migration_lines import describe_bytes
from kv_pool.control.client import ControlClient


def tiers(socket: Socket = None, node: Node = None, json: Json = False) -> None:
    """Show the tiers below a running pool, the warmest first."""
    with ControlClient(socket, node=node) as client:
        found = client.list_tiers()
    if json:
        print(msgspec.json.encode(found).decode())
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("tier", "blocks", "bytes", "stored", "read", "removed", "errors"):
        table.add_column(title, justify="left" if title == "tier" else "right")
    for tier in found.tiers:
        table.add_row(
            tier.medium,
            f"{tier.num_blocks:,} of {tier.capacity:,}",
            describe_bytes(tier.num_blocks * tier.block_bytes),
            f"{tier.num_stored:,}",
            f"{tier.num_read:,}",
            f"{tier.num_removed:,}",
            f"{tier.num_read_errors + tier.num_write_errors:,}",
        )
    Console().print(table)
    hits = ", ".join(f"{medium} {count:,}" for medium, count in found.hit_blocks.items())
    print(f"blocks that requests began with: {hits}; {found.num_dropped:,} blocks went to no tier")
