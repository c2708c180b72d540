"""`kv-pool trace split`: make several traces of one."""

from typing import Annotated

import typer

from kv_pool.cli.setting_options import takes
from kv_pool.replay.split import PARTITIONS, split_trace
from kv_pool.replay.trace_options import TraceOptions


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
    trace = options.open()
    counts = split_trace(trace, by, output, num_parts=parts, every_s=every)
    size = "" if trace.block_size is None else f"; --trace-block-size {trace.block_size}"
    skipped = f"; {trace.num_broken:,} broken lines skipped" if trace.num_broken else ""
    print(f"{len(counts):,} files, {sum(counts.values()):,} requests{skipped}{size}")
