"""Options shared by the sub-commands for a running pool."""

from typing import Annotated

import typer

from kv_pool.ids import NodeName

Socket = Annotated[
    str | None,
    typer.Option(help="The pool's control socket. Default: the socket of this user's kv-pool serve."),
]
Node = Annotated[
    NodeName | None,
    typer.Option(metavar="NAME", parser=NodeName, help="The node to connect to: its kv-pool serve --name."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
