"""`kv-pool trace merge`: make one trace of several, each as a tenant."""

from typing import Annotated

import typer

from kv_pool.cli.progress import count_requests
from kv_pool.cli.trace_generate import Output
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.merge import merge_traces
from kv_pool.replay.settings import TIME_UNIT
from kv_pool.replay.trace import Trace
from kv_pool.replay.trace_writer import open_trace_writer


def merge(
    traces: Annotated[list[str], typer.Argument(metavar="TRACE...", help="Traces of one block size.")],
    output: Output,
    names: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Names of the tenants. Default: the names of the files."),
    ] = None,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Leave hash ids as they are: equal ids of different traces mean equal blocks. Default: "
            "renumber them, so that no two traces share a block.",
        ),
    ] = False,
    trace_block_size: Annotated[
        int | None, typer.Option(help="Tokens per hash id. Default: inferred from each trace.", min=1)
    ] = None,
    timestamp_unit: Annotated[
        str, typer.Option(*TIME_UNIT.flags, help="Unit of the traces' timestamps: ms, s, us or ns.")
    ] = "ms",
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Skip broken lines, instead of stopping.")
    ] = False,
) -> None:
    """Merge traces on one clock: each request gets a tenant, and ids of its own."""
    opened = [
        Trace(path, block_size=trace_block_size, timestamp_unit=timestamp_unit, skip_broken=skip_broken)
        for path in traces
    ]
    tenants = None if names is None else [name.strip() for name in names.split(",")]
    if tenants is not None and not all(tenants):
        raise InvalidArgumentError(f"--names {names!r} contains an empty name")
    lines = merge_traces(opened, tenants, shared=shared)
    with open_trace_writer(output) as write:
        for line in count_requests("merging", lines):
            write(line)
    num_skipped = sum(trace.num_broken for trace in opened)
    print(
        f"{output}: {len(opened)} tenants" + (f", {num_skipped:,} broken lines skipped" * bool(num_skipped))
    )
