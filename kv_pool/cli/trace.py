"""`kv-pool trace`: describe, generate, convert, merge and split traces."""

import typer

from kv_pool.cli.trace_convert import convert
from kv_pool.cli.trace_generate import generate
from kv_pool.cli.trace_info import info
from kv_pool.cli.trace_merge import merge
from kv_pool.cli.trace_split import split

trace = typer.Typer(help="Describe, generate, convert, merge and split traces.", no_args_is_help=True)
trace.command()(info)
trace.add_typer(generate, name="generate")
trace.command()(convert)
trace.command()(merge)
trace.command()(split)
