"""The sub-commands of `kv-pool` as one click command, with help that shows brackets and plain flags."""

from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.markup import escape

from kv_pool.cli.defrag import defrag
from kv_pool.cli.events import events
from kv_pool.cli.info import info
from kv_pool.cli.layout import layout
from kv_pool.cli.migrate import migrate
from kv_pool.cli.migration_status import migration_status
from kv_pool.cli.peers import peers
from kv_pool.cli.replay import replay
from kv_pool.cli.sequences import sequences
from kv_pool.cli.serve import serve
from kv_pool.cli.stats import stats
from kv_pool.cli.sweep import sweep
from kv_pool.cli.tiers import tiers
from kv_pool.cli.topology import topology


def make_command(version: str) -> Callable[[], Any]:
    """Return the command that parses `sys.argv` and runs."""
    app = typer.Typer(
        name="kv-pool",
        help="A KV-cache block pool with prefix caching: replay traces through it, watch a running one.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"kv_pool {version}")
            raise typer.Exit

    @app.callback()
    def start(
        is_version: Annotated[
            bool,
            typer.Option(
                "--version", help="Show the version and exit.", callback=show_version, is_eager=True
            ),
        ] = False,
    ) -> None:
        pass

    app.command()(replay)
    app.command()(sweep)
    app.command()(serve)
    app.command()(stats)
    app.command()(defrag)
    app.command()(layout)
    app.command()(sequences)
    app.command()(tiers)
    app.command()(migrate)
    app.command(name="migration-status")(migration_status)
    app.command()(peers)
    app.command()(topology)
    app.command()(events)
    app.command()(info)
    command: Any = typer.main.get_command(app)
    for each in (command, *command.commands.values()):
        _show_help_as_written(each)
    return command  # type: ignore[no-any-return]


def _show_help_as_written(command: Any) -> None:
    """Keep rich from reading `[...]` in help texts as markup, and typer from calling flags `<bool>`."""
    options = [*command.params, command.get_help_option(typer.Context(command))]
    for option in options:
        if option is None:
            continue
        if getattr(option, "help", None):
            option.help = escape(option.help)
        if getattr(option, "is_flag", False):
            option.metavar = ""
