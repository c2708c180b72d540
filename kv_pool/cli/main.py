"""`kv-pool`: the command line's entry point."""

import sys

from kv_pool.errors import KVPoolError


def main() -> None:
    """Run a sub-command. What the library refuses is one line on stderr and exit status 2."""
    try:
        import rich  # noqa: F401
        import typer
    except ImportError:
        sys.exit("kv-pool needs typer and rich: pip install 'kv_pool[cli]'")
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

    app = typer.Typer(
        name="kv-pool",
        help="A KV-cache block pool with prefix caching: replay traces through it, watch a running one.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
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
    app.command()(events)
    app.command()(info)
    try:
        app()
    except KVPoolError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
