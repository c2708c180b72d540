"""`kv-pool defrag`: bring the blocks of a running pool together, now."""

from typing import Annotated

import typer

from kv_pool.cli.console import print_json
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.control.client import ControlClient


def defrag(
    max_moves: Annotated[
        int | None, typer.Option(help="Stop after so many blocks; run it again to go on.", min=1)
    ] = None,
    max_evictions: Annotated[
        int,
        typer.Option(
            help="Cached blocks that may be lost, where that saves copies; by default none is.",
            min=0,
        ),
    ] = 0,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Compact a running pool and show what that gave."""
    with ControlClient(socket, node=node) as client:
        report = client.defragment(max_moves, max_evictions)
    if json:
        print_json(report)
        return
    print("Defragmentation complete:")
    print(f"  Moved Blocks: {report.moved_blocks}")
    print(f"  Time: {report.time_ms:.1f}ms")
    print(
        f"  Fragmentation Rate: {report.fragmentation_rate_before:.1%} → "
        f"{report.fragmentation_rate_after:.1%} (runs of {report.run_length})"
    )
    if not report.moved_blocks and report.fragmentation_rate_after:
        reason = "two blocks that change places are two moves" if max_moves == 1 else "all is packed, or held"
        print(f"  Nothing moved: {reason}.")
