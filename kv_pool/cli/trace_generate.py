"""`kv-pool trace generate`: write a generated workload of any size as a trace."""

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.progress import TaskProgressColumn

from kv_pool.cli.progress import make_progress_bar
from kv_pool.cli.setting_options import takes
from kv_pool.replay.trace_writer import open_trace_writer
from kv_pool.replay.workloads.agent import AgentSettings, generate_agent
from kv_pool.replay.workloads.chat import ChatSettings, generate_chat
from kv_pool.replay.workloads.distributions import FORMAT
from kv_pool.replay.workloads.rag import RAGSettings, generate_rag
from kv_pool.replay.workloads.workload import GeneratedRequest

Output = Annotated[
    str,
    typer.Option("--output", "-o", metavar="FILE", help="The trace to write: .jsonl, .gz, .xz or .zst."),
]
_NOTATION = f"DISTRIBUTION is {FORMAT}."
_SIZE = (
    "requests seed output block_size max_tokens sessions_per_s arrival_shape system_prompts system_skew "
    "system_tokens"
)

generate = typer.Typer(
    help="Write a generated workload as a trace. The same options give the same requests on every platform.",
    no_args_is_help=True,
)


@generate.command(epilog=_NOTATION)
@takes(
    ChatSettings,
    f"{_SIZE} turns think_time first_tokens message_tokens output_tokens",
)
def chat(settings: ChatSettings, output: Output) -> None:
    """Write a chat workload: conversations whose turns repeat the conversation so far."""
    _write(generate_chat(settings), settings.num_requests, output)


@generate.command(epilog=_NOTATION)
@takes(
    AgentSettings,
    f"{_SIZE} turns steps tool_pause think_time task_tokens tool_tokens message_tokens output_tokens "
    "summary_tokens",
)
def agent(settings: AgentSettings, output: Output) -> None:
    """Write an agent workload: user turns of many tool calls, with pauses and compaction."""
    _write(generate_agent(settings), settings.num_requests, output)


@generate.command(epilog=_NOTATION)
@takes(
    RAGSettings,
    f"{_SIZE} documents document_skew retrieved document_tokens first_tokens turns think_time "
    "message_tokens output_tokens",
)
def rag(settings: RAGSettings, output: Output) -> None:
    """Write a RAG workload: questions about retrieved documents of different popularity."""
    _write(generate_rag(settings), settings.num_requests, output)


def _write(requests: Iterable[GeneratedRequest], num_requests: int, output: str) -> None:
    with (
        open_trace_writer(output) as write,
        make_progress_bar("generating", TaskProgressColumn()) as bar,
    ):
        task = bar.add_task("generate", total=num_requests, live="")
        num_tokens = num_ids = number = 0
        for number, request in enumerate(requests, 1):
            write(request)
            num_tokens += request.input_length
            num_ids += len(request.hash_ids)
            if number % 100 == 0:
                bar.update(task, completed=number, live=f"{number:,} requests")
    print(f"{output}: {number:,} requests, {num_tokens:,} prompt tokens, {num_ids:,} hash ids")
