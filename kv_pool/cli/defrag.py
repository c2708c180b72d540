"""`kv-pool defrag`: compact a running pool."""

from typing import Annotated

import typer

from kv_pool.cli.console import print_json
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.control.client import ControlClient


def defrag(
    max_moves: Annotated[
        int | None,
        typer.Option(help="Stop after moving this many blocks; repeat the command to continue.", min=1),
    ] = None,
    max_evictions: Annotated[
        int,
        typer.Option(
            help="Cached blocks that may be evicted where that saves copies. Default: none.",
            min=0,
        ),
    ] = 0,
    socket: Socket = None,
    node: Node = None,
    json: Json = False,
) -> None:
    """Compact a running pool and show the result."""
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
        reason = (
            "exchanging two blocks takes two moves"
            if max_moves == 1
            else "the blocks are compact, or held in place"
        )
        print(f"  Nothing moved: {reason}.")
