"""`kv-pool info`: show which kv_pool is installed, and its environment variables."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json
from kv_pool.cli.foreign_text import escape_lines, make_cell
from kv_pool.core.mode import COMPILED
from kv_pool.environment import VARIABLES, list_mistakes
from kv_pool.version import __version__

_PACKAGES = ("msgspec", "xxhash", "numpy", "cbor2", "typer", "rich", "matplotlib", "backports.zstd", "pyzmq")


def info(json: Json = False) -> None:
    """Show whether the core runs compiled, the versions of dependencies, and the environment variables."""
    facts = {
        "kv_pool": __version__,
        "core": "compiled (mypyc)" if COMPILED else "plain Python",
        "installed in": str(Path(__file__).parent.parent),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
    }
    packages = {name: _find_version(name) for name in _PACKAGES}
    variables = {variable.name: os.environ.get(variable.name) for variable in VARIABLES}
    mistakes = list_mistakes()
    if json:
        print_json(facts | {"packages": packages, "environment": variables, "mistakes": mistakes})
        return
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in {**facts, **packages}.items():
        table.add_row(name, make_cell(value or "not installed"))
    print_table(table)
    table = Table()
    for title in ("variable", "set to", "values, default first", "meaning"):
        table.add_column(title, no_wrap=title != "meaning")
    for variable in VARIABLES:
        given = make_cell(variables[variable.name] or "")
        table.add_row(variable.name, given, variable.values, variable.meaning)
    print_table(table)
    for mistake in mistakes:
        print(f"wrong setting: {escape_lines(mistake)}")


def _find_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
