"""`kv-pool`: the command line's entry point."""

import sys
from pathlib import Path

from kv_pool.core.block import COMPILED
from kv_pool.errors import KVPoolError, describe_install
from kv_pool.version import __version__


def main() -> None:
    """Run a sub-command. An error of the library is one line on stderr and exit status 2."""
    from kv_pool.cli.signals import EndedBySignal, defer_signals, end_on_signals, exit_at_once

    end_on_signals()
    with defer_signals():  # what is raised in an import may be printed and lost
        try:
            import rich  # noqa: F401
            import typer  # noqa: F401
        except ImportError:
            sys.exit(f"kv-pool needs typer and rich: {describe_install('cli')}")
        from kv_pool.cli.console import end_for_closed_output, prepare_streams, print_error, print_note
        from kv_pool.cli.sub_commands import COMMANDS, make_command

    prepare_streams()
    note = _explain_sources()
    if note:
        print_note(note)
    try:
        try:
            # Import only the named command; help and completion need all of them.
            named = [name for name in sys.argv[1:2] if name in COMMANDS]
            with defer_signals():
                command = make_command(__version__, named or COMMANDS)
            command()
        finally:
            sys.stdout.flush()
    except EndedBySignal as ended:
        exit_at_once(ended.status)
    except BrokenPipeError:
        end_for_closed_output()
    except KVPoolError as error:
        print_error(error)
        sys.exit(2)


def _explain_sources() -> str:
    """Return which compiled package is installed but does not run, and the way out; "" otherwise.

    In a checkout, `python -m kv_pool` finds the sources in the current folder first. A checkout that
    PYTHONPATH names is meant, and is not reported.
    """
    ours = Path(__file__).parents[1]
    if COMPILED or not sys.path or Path(sys.path[0] or ".").resolve() != ours.parent:
        return ""
    if any(Path(entry).resolve() == ours.parent for entry in sys.path[1:] if entry):
        return ""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        installed = Path(str(distribution("kv_pool").locate_file("kv_pool")))
    except PackageNotFoundError:
        return ""
    if not any(path.suffix in (".so", ".pyd") for path in (installed / "core").glob("block.*")):
        return ""
    return (
        f"the plain sources in {ours.parent} run, not the compiled package in {installed}; for that one use "
        "kv-pool or python -P -m kv_pool"
    )


if __name__ == "__main__":
    main()
