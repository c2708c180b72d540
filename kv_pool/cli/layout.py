"""`kv-pool layout`: draw the memory map of a running pool."""

from typing import Annotated

import typer
from rich.console import Console

from kv_pool.cli.console import print_json
from kv_pool.cli.control_options import Json, Node, Socket
from kv_pool.control.client import ControlClient
from kv_pool.control.layout_picture import check_can_draw, draw_layout
from kv_pool.control.layout_text import print_layout


def layout(
    socket: Socket = None,
    node: Node = None,
    width: Annotated[
        int | None,
        typer.Option(
            help="Cells per row in the terminal. Default: the largest power of two that fits.", min=1
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Draw to this .svg or .png file instead.")
    ] = None,
    json: Json = False,
) -> None:
    """Draw which blocks of a running pool are free, cached, in use or held in place, and its runs."""
    if output is not None:
        check_can_draw(output)
    with ControlClient(socket, node=node) as client:
        found = client.get_layout()
    if output is not None:
        draw_layout(found, output)
    if json:
        print_json(found)
    elif output is None:
        print_layout(found, Console(), width)
    else:
        print(f"memory map: {output}")
