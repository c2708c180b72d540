"""The sub-commands of `kv-pool` as one click command, with help that shows brackets and plain flags."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape

from kv_pool.environment import VARIABLES

COMMANDS = {
    "replay": "replay",
    "sweep": "replay",
    "compare": "compare",
    "trace": "trace",
    "curve": "curve",
    "plan": "plan",
    "serve": "serve",
    "top": "top",
    "stats": "running_pool",
    "defrag": "running_pool",
    "layout": "running_pool",
    "sequences": "running_pool",
    "tiers": "running_pool",
    "migrate": "migrate",
    "migration-status": "migrate",
    "peers": "running_pool",
    "topology": "info",
    "events": "events",
    "info": "info",
}
"""The sub-commands in the order of the help, and the module of `kv_pool.cli` that each is in."""


def make_command(version: str, names: Iterable[str] = COMMANDS) -> Callable[[], Any]:
    """Return the command that parses `sys.argv` and runs.

    Args:
        names: the sub-commands to include. The modules of the others are not imported.
    """
    app = typer.Typer(
        name="kv-pool",
        help="A KV-cache block pool with prefix caching: replay traces, watch and operate a running pool.",
        epilog=_describe_variables(),
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

    for name in names:
        module = import_module(f"kv_pool.cli.{COMMANDS[name]}")
        found = getattr(module, name.replace("-", "_"))
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name=name)(found)
    command: Any = typer.main.get_command(app)
    for each in _list_commands(command):
        _show_help_as_written(each)
    return command  # type: ignore[no-any-return]


def _describe_variables() -> str:
    """Return the environment variables as paragraphs; typer joins the lines of each."""
    lines = [f"{one.name}={one.values}: {one.meaning}" for one in VARIABLES]
    title = "Environment variables, most of them for vLLM's engines, with their values, the default first:"
    return "\n\n".join([title, *map(escape, lines)])


def _list_commands(command: Any) -> Iterator[Any]:
    """Yield a command and all commands of its groups."""
    yield command
    for each in getattr(command, "commands", {}).values():
        yield from _list_commands(each)


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
