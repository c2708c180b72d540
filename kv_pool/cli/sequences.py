"""`kv-pool sequences`: show the sequences and holds that own the blocks of a running pool."""

from typing import Annotated

import typer
from rich import box
from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.cli.foreign_text import make_cell
from kv_pool.control.client import ControlClient
from kv_pool.ids import BlockId
from kv_pool.reports.holds import HoldList, HoldSummary
from kv_pool.reports.sequences import SequenceList


def sequences(
    holds: Annotated[
        bool,
        typer.Option("--holds", help="List the holds that keep blocks in place instead, and their ages."),
    ] = False,
    block: Annotated[
        int | None, typer.Option(metavar="ID", help="List the holds on this block instead.", min=1)
    ] = None,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """List the sequences, or requests, of a running pool, least recently used first.

    The requests of a KVCacheManager are listed in the order of their admission.
    """
    with ControlClient(socket, node=node) as client:
        found: SequenceList | HoldList
        block_id = None if block is None else BlockId(block)
        found = client.list_holds(block_id) if holds or block is not None else client.describe_sequences()
    if json:
        print_json(found)
    elif isinstance(found, HoldList):
        _print_holds(found)
    else:
        _print_sequences(found)


def _print_sequences(found: SequenceList) -> None:
    listed = found.sequences
    columns = {
        "sequence": [str(one.sequence_id) for one in listed],
        "blocks": [f"{one.num_blocks:,}" for one in listed],
        "held in place": [
            f"{one.num_immovable_blocks:,}" if one.num_immovable_blocks else "" for one in listed
        ],
        "tokens": ["" if one.num_tokens is None else f"{one.num_tokens:,}" for one in listed],
        "priority": ["" if one.priority is None else str(one.priority) for one in listed],
        "last used": ["" if one.idle_s is None else f"{one.idle_s:.1f} s ago" for one in listed],
        "": ["in transit" if one.is_in_transit else "" for one in listed],
    }
    known = {title: cells for title, cells in columns.items() if any(cells)} or columns
    table = Table(box=box.SIMPLE)
    for title in known:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for row in zip(*known.values(), strict=True):
        table.add_row(*map(make_cell, row))
    print_table(table)


def _print_holds(found: HoldList) -> None:
    table = Table(box=box.SIMPLE)
    for title in ("blocks", "ids", "held for", "until", "", "held as"):
        table.add_column(title, justify="right" if title in ("blocks", "held for") else "left")
    for hold in found.holds:
        more = ", ..." if hold.num_blocks > len(hold.block_ids) else ""
        table.add_row(
            f"{hold.num_blocks:,}",
            ", ".join(map(str, hold.block_ids)) + more,
            f"{hold.age_s:.1f} s",
            "" if hold.remaining_s is None else f"in {hold.remaining_s:.1f} s",
            _name_kind(hold),
            make_cell(hold.reason),
        )
    print_table(table)


def _name_kind(hold: HoldSummary) -> str:
    if hold.is_quarantined:
        return "quarantined"
    if not hold.has_references:
        return "id only"
    return "movable" if hold.is_movable else ""
