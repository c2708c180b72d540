"""`kv-pool`: the command line's entry point."""

import sys

from kv_pool.errors import KVPoolError, describe_install
from kv_pool.version import __version__


def main() -> None:
    """Run a sub-command. An error of the library is one line on stderr and exit status 2."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        sys.exit(f"kv-pool needs typer and rich: {describe_install('cli')}")
    from kv_pool.cli.console import end_for_closed_output, prepare_streams, print_error
    from kv_pool.cli.signals import EndedBySignal, end_on_signals, exit_at_once
    from kv_pool.cli.sub_commands import COMMANDS, make_command

    end_on_signals()
    prepare_streams()
    try:
        try:
            # Import only the named command; help and completion need all of them.
            named = [name for name in sys.argv[1:2] if name in COMMANDS]
            make_command(__version__, named or COMMANDS)()
        finally:
            sys.stdout.flush()
    except EndedBySignal as ended:
        exit_at_once(ended.status)
    except BrokenPipeError:
        end_for_closed_output()
    except KVPoolError as error:
        print_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
