"""LMCache's lookup logs: one line of JSON per lookup of a prompt's chunks.

Source: LMCache/LMCache, lmcache/tools/cache_simulator/README.md at commit 090b924, and simulator.py there. A
server that runs with --lookup-hash-log-dir writes files lookup_hashes_*.jsonl with the fields `timestamp`
(seconds since 1970), `request_id`, `model_name`, `chunk_size`, `seq_len` (prompt tokens), `dtypes`, `shapes`
and `chunk_hashes` (hexadecimal, full chunks only; a hash covers its chunk and all before it).
"""

from typing import Any

import msgspec

from kv_pool.lab.formats.foreign_reader import ForeignReader
from kv_pool.lab.trace import TraceRequest

_MODEL = "unknown"


class _Record(msgspec.Struct):
    timestamp: float
    chunk_size: int
    seq_len: int
    chunk_hashes: list[str | int]
    model_name: str | None = None


_decode = msgspec.json.Decoder(_Record).decode


class LMCacheReader(ForeignReader):
    """Reads a lookup log: a file, or a folder of lookup_hashes_*.jsonl in the order of their names.

    Chunks of different models are different.

    Raises:
        TraceError: there is no file; while iterating, a line is broken, or the chunk size changes.
    """

    losses = (
        "generated tokens: the log has none, output_length is 0",
        "sessions: the log has none",
        "a lookup that is tried again is a request of its own",
    )
    write_losses = (
        "generated tokens, sessions and tenants",
        "ids of partial last blocks",
        "shapes and dtypes of the KV cache, which are empty: LMCache's simulator needs --kv-bytes-per-chunk",
    )

    log_names = (r"lookup_hashes_.*\.jsonl", "lookup_hashes_*.jsonl")

    def _parse(self, text: bytes, line: int) -> TraceRequest:
        record = _decode(text)
        model = record.model_name or _MODEL
        request = TraceRequest(
            line,
            record.timestamp * self._ms_per_unit,
            record.seq_len,
            hash_ids=[(model, one if isinstance(one, int) else int(one, 16)) for one in record.chunk_hashes],
        )
        return self._check_blocks(request, record.chunk_size)

    @staticmethod
    def make_lines(request: TraceRequest, number: int, block_size: int | None) -> list[dict[str, Any]]:
        assert block_size is not None, "token ids are hashed for this format"
        num_full = request.input_length // block_size
        line = {
            "timestamp": request.arrival_ms / 1000,
            "request_id": f"request-{number}",
            "model_name": _MODEL,
            "chunk_size": block_size,
            "seq_len": request.input_length,
            "dtypes": [],
            "shapes": [],
            "chunk_hashes": [f"0x{key:016x}" for key in (request.hash_ids or ())[:num_full]],
        }
        return [line]
