"""Qwen-Bailian's published traces: one line of JSON per request of a chat service.

Source: alibaba-edu/qwen-bailian-usagetraces-anon, README.md at commit 03a51e3, files qwen_*_blksz_16.jsonl:

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
     "type": "text", "turn": 2, "hash_ids": [1089, 1090, ...]}

`timestamp` is in seconds since the start of the trace. `parent_chat_id` is the turn before, -1 for the first
one. `hash_ids` has one id for each block of 16 tokens, a partial last one included. An id is that of the
block's tokens alone, so that a block is identified by its id and all ids before it.
"""

from collections.abc import Iterator

import msgspec

from kv_pool.lab.formats.foreign_reader import ForeignReader
from kv_pool.lab.trace import TraceRequest

BLOCK_SIZE = 16


class _Record(msgspec.Struct):
    chat_id: int | str
    input_length: int
    timestamp: float | None = None
    parent_chat_id: int | str | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None


_decode = msgspec.json.Decoder(_Record).decode


class QwenBailianReader(ForeignReader):
    """Reads a trace. A conversation is a session, named by its first request. A hash id has 16 tokens.

    Raises:
        TraceError: while iterating, a line is broken.

    Memory: a number for each distinct prefix in blocks, and one for each request.
    """

    losses = ("types of requests",)

    def __iter__(self) -> Iterator[TraceRequest]:
        self.block_size = self._given_block_size or BLOCK_SIZE
        self._prefixes: dict[tuple[int, int], int] = {}
        self._first_of: dict[int | str, int | str] = {}
        yield from super().__iter__()

    def _parse(self, text: bytes, line: int) -> TraceRequest:
        record = _decode(text)
        parent = record.parent_chat_id
        first = record.chat_id
        if parent is not None and parent != -1:
            first = self._first_of.get(parent, parent)
        request = TraceRequest(
            line,
            (record.timestamp or 0.0) * self._ms_per_unit,
            record.input_length,
            record.output_length or 0,
            hash_ids=record.hash_ids,
            session_id=str(first),
        )
        if record.hash_ids is not None:
            self._check_blocks(request, self.block_size or BLOCK_SIZE)
            request.hash_ids = self._number_prefixes(record.hash_ids)
        self._first_of[record.chat_id] = first
        return request

    def _number_prefixes(self, hash_ids: list[int]) -> list[int]:
        prefixes = self._prefixes
        before = -1
        found = []
        for one in hash_ids:
            before = prefixes.setdefault((before, one), len(prefixes))
            found.append(before)
        return found
