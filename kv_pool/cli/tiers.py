"""`kv-pool tiers`: show the lower tiers of a running pool and the blocks onboarded from them."""

from rich import box
from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.foreign_text import escape_text, make_cell
from kv_pool.cli.migration_lines import describe_bytes
from kv_pool.control.client import ControlClient


def tiers(socket: Socket = None, node: Node = None, json: Json = False) -> None:
    """Show the lower tiers of a running pool, fastest first."""
    with ControlClient(socket, node=node) as client:
        found = client.list_tiers()
    if json:
        print_json(found)
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("tier", "blocks", "bytes", "stored", "read", "removed", "errors"):
        table.add_column(title, justify="left" if title == "tier" else "right", no_wrap=True)
    for tier in found.tiers:
        table.add_row(
            make_cell(tier.medium),
            f"{tier.num_blocks:,} of {tier.capacity:,}",
            describe_bytes(tier.num_blocks * tier.block_bytes),
            f"{tier.num_stored:,}",
            f"{tier.num_read:,}",
            f"{tier.num_removed:,}",
            f"{tier.num_read_errors + tier.num_write_errors:,}",
        )
    print_table(table)
    hits = ", ".join(f"{escape_text(medium)} {count:,}" for medium, count in found.hit_blocks.items())
    print(f"hit blocks by medium: {hits}; {found.num_dropped:,} evicted blocks were not offloaded")
