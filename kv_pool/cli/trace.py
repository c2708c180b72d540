"""`kv-pool trace`: describe, generate, convert, merge and split traces."""

from collections.abc import Iterable
from dataclasses import replace

import typer

from kv_pool.cli.console import print_report, show_progress
from kv_pool.cli.foreign_text import escape_text
from kv_pool.cli.setting_options import AS_JSON, takes
from kv_pool.errors import InvalidArgumentError
from kv_pool.lab.formats.convert import READ_LOSSES, WRITE_LOSSES, ConvertSettings, convert_trace
from kv_pool.lab.merge import PARTITIONS, merge_traces, split_trace
from kv_pool.lab.settings import ReplaySettings
from kv_pool.lab.trace_info import describe_trace, report_trace
from kv_pool.lab.trace_writer import open_trace_writer
from kv_pool.lab.workloads.agent import AgentSettings, generate_agent
from kv_pool.lab.workloads.chat import ChatSettings, generate_chat
from kv_pool.lab.workloads.distributions import FORMAT
from kv_pool.lab.workloads.rag import RAGSettings, generate_rag
from kv_pool.lab.workloads.workload import GeneratedRequest
from kv_pool.option import Option, setting

_OUTPUT = Option("The trace to write: .jsonl, .gz, .xz or .zst.", metavar="FILE", flags=("--output", "-o"))
trace = typer.Typer(help="Describe, generate, convert, merge and split traces.", no_args_is_help=True)
_NOTATION = f"DISTRIBUTION is {FORMAT}."
_SIZE = (
    "requests seed output block_size max_tokens sessions_per_s arrival_shape system_prompts system_skew "
    "system_tokens"
)


@trace.command()
@takes("trace block_size json trace_block_size timestamp_unit skip_broken", num_blocks=1)
def info(
    settings: ReplaySettings,
    block_size: int = setting("Tokens per block, for traces of token ids.", default=16, min=1),
    json: bool = setting(AS_JSON, default=False),
) -> None:
    """Describe a trace: requests, blocks, sessions, reuse, and the hit rate of a cache that never evicts."""
    trace = settings.open_trace()
    with show_progress("reading") as notify:
        found = describe_trace(trace, block_size, notify)
    print_report(report_trace(found), json)


generate = typer.Typer(
    help="Write a generated workload as a trace. The same options give the same requests on every platform.",
    no_args_is_help=True,
)


@generate.command(epilog=_NOTATION)
@takes(
    f"{_SIZE} turns think_time first_tokens message_tokens output_tokens",
)
def chat(settings: ChatSettings, output: str = setting(_OUTPUT)) -> None:
    """Write a chat workload: conversations whose turns repeat the conversation so far."""
    _write(generate_chat(settings), settings.num_requests, output)


@generate.command(epilog=_NOTATION)
@takes(
    f"{_SIZE} turns steps tool_pause think_time task_tokens tool_tokens message_tokens output_tokens "
    "summary_tokens",
)
def agent(settings: AgentSettings, output: str = setting(_OUTPUT)) -> None:
    """Write an agent workload: user turns of many tool calls, with pauses and compaction."""
    _write(generate_agent(settings), settings.num_requests, output)


@generate.command(epilog=_NOTATION)
@takes(
    f"{_SIZE} documents document_skew retrieved document_tokens first_tokens turns think_time "
    "message_tokens output_tokens",
)
def rag(settings: RAGSettings, output: str = setting(_OUTPUT)) -> None:
    """Write a RAG workload: questions about retrieved documents of different popularity."""
    _write(generate_rag(settings), settings.num_requests, output)


def _write(requests: Iterable[GeneratedRequest], num_requests: int, output: str) -> None:
    with open_trace_writer(output) as write, show_progress("generating") as notify:
        num_tokens = num_ids = number = 0
        for number, request in enumerate(requests, 1):
            write(request)
            num_tokens += request.input_length
            num_ids += len(request.hash_ids)
            if number % 100 == 0:
                notify(f"{number:,} requests", number / num_requests)
    print(f"{output}: {number:,} requests, {num_tokens:,} prompt tokens, {num_ids:,} hash ids")


trace.add_typer(generate, name="generate")


@trace.command()
@takes(
    "source source_format output target_format block_size trace_block_size session_gap timestamp_unit "
    "skip_broken",
)
def convert(settings: ConvertSettings, output: str = setting(_OUTPUT)) -> None:
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
@takes(
    "traces output names shared trace_block_size timestamp_unit skip_broken",
    trace="",
    num_blocks=1,
)
def merge(
    settings: ReplaySettings,
    traces: list[str] = setting("Traces of one block size.", metavar="TRACE...", is_argument=True),
    output: str = setting(_OUTPUT),
    names: str | None = setting(
        "Names of the tenants. Default: the names of the files.", default=None, metavar="NAME,NAME"
    ),
    shared: bool = setting(
        "Leave hash ids as they are: equal ids of different traces mean equal blocks. Default: renumber "
        "them, so that no two traces share a block.",
        default=False,
    ),
) -> None:
    """Merge traces on one clock: each request gets a tenant, and ids of its own."""
    opened = [replace(settings, trace=path).open_trace() for path in traces]
    tenants = None if names is None else [name.strip() for name in names.split(",")]
    if tenants is not None and not all(tenants):
        raise InvalidArgumentError(f"--names {names!r} contains an empty name")
    lines = merge_traces(opened, tenants, shared=shared)
    with open_trace_writer(output) as write, show_progress("merging") as notify:
        for number, line in enumerate(lines, 1):
            write(line)
            if number % 100 == 0:
                notify(f"{number:,} requests", None)
    num_skipped = sum(one.num_broken for one in opened)
    print(
        f"{output}: {len(opened)} tenants" + (f", {num_skipped:,} broken lines skipped" * bool(num_skipped))
    )


@trace.command()
@takes("trace by output parts every trace_block_size timestamp_unit skip_broken", num_blocks=1)
def split(
    settings: ReplaySettings,
    by: str = setting(f"What a part is: {', '.join(PARTITIONS)}.", known=lambda: PARTITIONS),
    output: str = setting(
        "Path of the parts, with {part} for their names, such as parts/{part}.jsonl.gz.",
        metavar="PATTERN",
        flags=("--output", "-o"),
    ),
    parts: int | None = setting(
        "With --by session: deal the sessions to this number of files. Default: a file for each.",
        default=None,
        min=1,
    ),
    every: float | None = setting("With --by time: seconds of a part.", default=None, metavar="SECONDS"),
) -> None:
    """Split a trace by session, by tenant (which undoes a merge), or by time."""
    opened = settings.open_trace()
    counts = split_trace(opened, by, output, num_parts=parts, every_s=every)
    size = "" if opened.block_size is None else f"; --trace-block-size {opened.block_size}"
    skipped = f"; {opened.num_broken:,} broken lines skipped" if opened.num_broken else ""
    print(f"{len(counts):,} files, {sum(counts.values()):,} requests{skipped}{size}")
