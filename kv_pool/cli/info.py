"""`kv-pool info`: which kv_pool this is."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kv_pool.core.mode import COMPILED
from kv_pool.version import __version__

_PACKAGES = ("msgspec", "xxhash", "numpy", "cbor2", "typer", "rich", "matplotlib", "backports.zstd")


def info() -> None:
    """Say whether the core runs compiled or plain, and the versions of everything."""
    table = Table(show_header=False)
    table.add_row("kv_pool", __version__)
    table.add_row("core", "compiled (mypyc)" if COMPILED else "plain Python")
    table.add_row("installed in", str(Path(__file__).parent.parent))
    table.add_row("Python", f"{platform.python_implementation()} {platform.python_version()}")
    table.add_row("platform", platform.platform())
    for name in _PACKAGES:
        try:
            table.add_row(name, version(name))
        except PackageNotFoundError:
            table.add_row(name, "not installed")
    Console().print(table)
