"""LMCache's lookup logs: one line of JSON per lookup of a prompt's chunks.

Source: LMCache/LMCache, lmcache/tools/cache_simulator/README.md at commit 090b924, and simulator.py there. A
server that runs with --lookup-hash-log-dir writes files lookup_hashes_*.jsonl with the fields `timestamp`
(seconds since 1970), `request_id`, `model_name`, `chunk_size`, `seq_len` (prompt tokens), `dtypes`, `shapes`
and `chunk_hashes` (hexadecimal, full chunks only; a hash covers its chunk and all before it).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kv_pool.replay.formats.foreign_request import (
    ForeignRequest,
    check_block_size,
    check_blocks,
    check_lengths,
)
from kv_pool.replay.formats.log_files import list_log_files
from kv_pool.replay.line_reader import LineReader

READ_LOSSES = (
    "generated tokens: the log has none, output_length is 0",
    "sessions: the log has none",
    "a lookup that is tried again is a request of its own",
)
WRITE_LOSSES = (
    "generated tokens, sessions and tenants",
    "ids of partial last blocks",
    "shapes and dtypes of the KV cache, which are empty: LMCache's simulator needs --kv-bytes-per-chunk",
)

_MODEL = "unknown"


class _Record(msgspec.Struct):
    timestamp: float
    chunk_size: int
    seq_len: int
    chunk_hashes: list[str | int]
    model_name: str | None = None


class LMCacheReader:
    """Reads a lookup log: a file, or a folder of lookup_hashes_*.jsonl in the order of their names.

    Chunks of different models are different. `ms_per_unit` is the number of milliseconds per unit of time.

    Raises:
        TraceError: there is no file; while iterating, a line is broken, or the chunk size changes.
    """

    def __init__(self, path: Path, skip_broken: bool = False, ms_per_unit: float = 1000.0) -> None:
        self.block_size: int | None = None
        self.notes: list[str] = []
        self._ms_per_unit = ms_per_unit
        paths = [path]
        if path.is_dir():
            paths, self.notes = list_log_files(path, r"lookup_hashes_.*\.jsonl", "lookup_hashes_*.jsonl")
        self._readers = [LineReader(one, skip_broken=skip_broken) for one in paths]
        self._decode = msgspec.json.Decoder(_Record).decode

    @property
    def num_broken(self) -> int:
        return sum(reader.num_broken for reader in self._readers)

    @property
    def first_broken(self) -> str | None:
        return next((reader.first_broken for reader in self._readers if reader.first_broken), None)

    def __iter__(self) -> Iterator[ForeignRequest]:
        for reader in self._readers:
            yield from reader.read(self._parse)

    def _parse(self, text: bytes, line: int) -> ForeignRequest:
        record = self._decode(text)
        arrival_ms = record.timestamp * self._ms_per_unit
        check_lengths(record.seq_len, 0, arrival_ms)
        self.block_size = check_block_size(record.chunk_size, self.block_size)
        check_blocks(record.seq_len, len(record.chunk_hashes), record.chunk_size)
        model = record.model_name or _MODEL
        return ForeignRequest(
            line,
            arrival_ms,
            record.seq_len,
            blocks=[(model, _read_hash(one)) for one in record.chunk_hashes],
        )


def _read_hash(chunk_hash: str | int) -> int:
    return chunk_hash if isinstance(chunk_hash, int) else int(chunk_hash, 16)


def make_lmcache_line(request: ForeignRequest, number: int, block_size: int) -> dict[str, Any]:
    """Return the line of a lookup log for a request with integer keys."""
    num_full = request.input_length // block_size
    return {
        "timestamp": request.arrival_ms / 1000,
        "request_id": f"request-{number}",
        "model_name": _MODEL,
        "chunk_size": block_size,
        "seq_len": request.input_length,
        "dtypes": [],
        "shapes": [],
        "chunk_hashes": [f"0x{key:016x}" for key in (request.blocks or ())[:num_full]],
    }
