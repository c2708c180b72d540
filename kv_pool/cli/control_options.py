"""Options that the sub-commands about a running pool share."""

from typing import Annotated

import typer

Socket = Annotated[
    str | None,
    typer.Option(help="The pool's control socket. Default: this user's, where kv-pool serve listens."),
]
Node = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The node whose pool is meant, as given to kv-pool serve --name."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
