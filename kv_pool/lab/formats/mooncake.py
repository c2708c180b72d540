"""Mooncake's traces, with the additions of kv_pool: session and tenant.

Source: kvcache-ai/Mooncake, FAST25-release/traces at commit 3b5a594: JSON lines of `timestamp` (ms),
`input_length`, `output_length`, `hash_ids` (one for each block of 512 tokens, a partial last one included).
Fields of kv_pool are described in `kv_pool/lab/README.md`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kv_pool.lab.formats.foreign_reader import ForeignReader
from kv_pool.lab.trace import Trace, TraceRequest


class MooncakeReader(ForeignReader):
    """Reads a trace."""

    losses = ("fields other than those of a trace line",)
    write_losses = ("the ids themselves: they are numbered by first appearance",)

    def __init__(
        self, path: Path, *, timestamp_unit: str | None = None, session_gap_s: float = 0.0, **options: Any
    ) -> None:
        self._trace = Trace(path, timestamp_unit=timestamp_unit or "ms", **options)
        self.block_size = self._trace.block_size
        self.notes = []
        self._files = [self._trace]

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._trace:
            if request.session_id is not None and request.tenant is not None:
                request.session_id = request.session_id.removeprefix(f"{request.tenant}/")
            yield request

    @staticmethod
    def make_lines(request: TraceRequest, number: int, block_size: int | None) -> list[dict[str, Any]]:
        arrival_ms = request.arrival_ms
        line = {
            "timestamp": int(arrival_ms) if arrival_ms == int(arrival_ms) else arrival_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "token_ids": request.token_ids,
            "hash_ids": request.hash_ids,
            "session_id": request.session_id,
            "tenant": request.tenant,
        }
        return [{name: value for name, value in line.items() if value is not None}]
