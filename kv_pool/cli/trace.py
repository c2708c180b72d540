"""`kv-pool trace`: describe, generate, convert, merge and split traces."""

from typing import Annotated

import typer

from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.progress import count_requests
from kv_pool.cli.setting_options import takes
from kv_pool.cli.trace_generate import Output, generate
from kv_pool.cli.trace_info import info
from kv_pool.errors import InvalidArgumentError
from kv_pool.replay.formats.convert import READ_LOSSES, WRITE_LOSSES, ConvertSettings, convert_trace
from kv_pool.replay.merge import merge_traces
from kv_pool.replay.settings import TIME_UNIT
from kv_pool.replay.split import PARTITIONS, split_trace
from kv_pool.replay.trace import Trace
from kv_pool.replay.trace_options import TraceOptions
from kv_pool.replay.trace_writer import open_trace_writer

trace = typer.Typer(help="Describe, generate, convert, merge and split traces.", no_args_is_help=True)
trace.command()(info)
trace.add_typer(generate, name="generate")


@trace.command()
@takes(
    ConvertSettings,
    "source source_format output target_format block_size trace_block_size session_gap timestamp_unit "
    "skip_broken",
)
def convert(settings: ConvertSettings, output: Output) -> None:
    """Convert a trace or a request log. Prints what the formats cannot hold.

    Reads Mooncake's, kv-cache-tester's (Weka's) and Qwen-Bailian's traces, LMCache's lookup logs, vLLM's and
    Dynamo's request logs, CSV files of lengths (Azure, BurstGPT, inference-perf), and recorded event streams
    of kv_pool (kv-pool events --json). Writes the first two, and logs.
    """
    report = convert_trace(settings, output)
    ids = "token ids" if report.block_size is None else f"{report.block_size} tokens per hash id"
    print(f"{escape_text(output)}: {report.num_requests:,} requests, {ids}")
    if report.num_broken:
        first = escape_text(report.first_broken or "")
        print(f"skipped: {report.num_broken:,} broken lines; the first: {first}")
    if report.num_late:
        print(f"late: {report.num_late:,} requests arrive before one that is written earlier")
    for note in report.notes:
        print(f"note: {escape_text(note)}")
    for loss in READ_LOSSES[settings.source_format]:
        print(f"not in {settings.source_format}: {loss}")
    for loss in WRITE_LOSSES[settings.target_format]:
        print(f"lost in {settings.target_format}: {loss}")


@trace.command()
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
    num_skipped = sum(one.num_broken for one in opened)
    print(
        f"{output}: {len(opened)} tenants" + (f", {num_skipped:,} broken lines skipped" * bool(num_skipped))
    )


@trace.command()
@takes(TraceOptions, "trace by output parts every trace_block_size timestamp_unit skip_broken")
def split(
    options: TraceOptions,
    by: Annotated[str, typer.Option(help=f"What a part is: {', '.join(PARTITIONS)}.")],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="PATTERN",
            help="Path of the parts, with {part} for their names, such as parts/{part}.jsonl.gz.",
        ),
    ],
    parts: Annotated[
        int | None,
        typer.Option(
            help="With --by session: deal the sessions to this number of files. Default: a file for each.",
            min=1,
        ),
    ] = None,
    every: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="With --by time: seconds of a part.")
    ] = None,
) -> None:
    """Split a trace by session, by tenant (which undoes a merge), or by time."""
    opened = options.open()
    counts = split_trace(opened, by, output, num_parts=parts, every_s=every)
    size = "" if opened.block_size is None else f"; --trace-block-size {opened.block_size}"
    skipped = f"; {opened.num_broken:,} broken lines skipped" if opened.num_broken else ""
    print(f"{len(counts):,} files, {sum(counts.values()):,} requests{skipped}{size}")
