"""`TraceOptions`: how to read a trace, for commands that run no replay."""

from dataclasses import dataclass
from typing import Annotated

from kv_pool.replay.option import Option, describe_options
from kv_pool.replay.settings import TIME_UNIT, TRACE_BLOCK_SIZE
from kv_pool.replay.trace import BUNDLED_TRACES, Trace


@describe_options
@dataclass(frozen=True)
class TraceOptions:
    """The file of a trace, and how to read it.

    Attributes:
    """

    trace: Annotated[
        str,
        Option(
            f"A trace file (.jsonl, .gz, .xz, .zst), or one of: {', '.join(BUNDLED_TRACES)}.",
            metavar="TRACE",
            is_argument=True,
        ),
    ]
    trace_block_size: Annotated[int | None, TRACE_BLOCK_SIZE] = None
    timestamp_unit: Annotated[str, TIME_UNIT] = "ms"
    skip_broken: Annotated[bool, Option("Skip broken lines and count them, instead of stopping.")] = False

    def open(self) -> Trace:
        """Open the trace. Raises TraceError."""
        return Trace(
            self.trace,
            block_size=self.trace_block_size,
            timestamp_unit=self.timestamp_unit,
            skip_broken=self.skip_broken,
        )
