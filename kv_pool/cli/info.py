"""`kv-pool info`: show which kv_pool is installed."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from kv_pool.cli.console import print_json, print_table
from kv_pool.cli.control_options import Json
from kv_pool.cli.foreign_text import make_cell
from kv_pool.core.mode import COMPILED
from kv_pool.version import __version__

_PACKAGES = ("msgspec", "xxhash", "numpy", "cbor2", "typer", "rich", "matplotlib", "backports.zstd")


def info(json: Json = False) -> None:
    """Show whether the core runs compiled, and the versions of kv_pool and its dependencies."""
    facts = {
        "kv_pool": __version__,
        "core": "compiled (mypyc)" if COMPILED else "plain Python",
        "installed in": str(Path(__file__).parent.parent),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
    }
    packages = {name: _find_version(name) for name in _PACKAGES}
    if json:
        print_json(facts | {"packages": packages})
        return
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in {**facts, **packages}.items():
        table.add_row(name, make_cell(value or "not installed"))
    print_table(table)


def _find_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
