"""Recorded event streams of a pool: the lines of `kv-pool events --json`.

Each line is an event: `kind` (stored, removed, cleared, lost, restarted, silent), `ts` (seconds since 1970),
and for stored blocks `block_hashes`, `parent_block_hash`, `block_size`, `group_idx`, `medium`; a hash covers
its block and all before it. A request that computes blocks stores them behind the blocks that it hits, so
each stored event tells an access: to its blocks, and to their ancestors.

Blocks that a request stores step by step (its prompt in chunks, its output) continue each other: an event
whose parent is the last block of an access at most `CONTINUES_WITHIN_S` before belongs to that access.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kv_pool.core.kv_events import MEDIUM_GPU
from kv_pool.events.publisher_blocks import to_medium
from kv_pool.lab.formats.foreign_reader import ForeignReader, check_block_size
from kv_pool.lab.trace import TraceRequest, check_ids, check_lengths

CONTINUES_WITHIN_S = 1.0


class _Line(msgspec.Struct):
    kind: str
    ts: float | None = None
    block_hashes: list[int] | None = None
    parent_block_hash: int | None = None
    block_size: int | None = None
    group_idx: int | None = None
    medium: str | None = None


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(slots=True)
class _Access:
    line: int
    ts: float
    last_ts: float
    blocks: list[int] = field(default_factory=list)


class EventLineReader(ForeignReader):
    """Reads the accesses to blocks from a recorded event stream, in the order of their beginnings.

    Memory: all hashes of the stream with their parents, and the accesses that are not over.

    Raises:
        TraceError: while iterating, a line is broken, the block size changes, or a block's parent was not
            recorded: record from the pool's start, or from a snapshot.
    """

    losses = (
        "requests whose blocks are all cached: they store nothing, unless the pool reports hits",
        "prompts and outputs apart: output blocks count as prompt, output_length is 0",
        "tokens behind the last full block, and requests of less than one block",
        "when requests arrived: the time of the batch with their first blocks is taken",
        "sessions, and two turns within a second, which become one request",
        "blocks of other groups than the first, and of lower tiers",
    )

    def __iter__(self) -> Iterator[TraceRequest]:
        self._parents: dict[int, int | None] = {}
        # The accesses in the order of their beginnings, and those that can go on by their last block.
        self._accesses: deque[_Access] = deque()
        self._open: dict[int, _Access] = {}
        for now_s in self._read(self._apply):
            yield from self._take_before(now_s - CONTINUES_WITHIN_S)
        yield from self._take_before(float("inf"))

    def _apply(self, text: bytes, line: int) -> float:
        """Apply a line. Return its time in seconds, 0 if it has none."""
        record = _decode(text)
        ts = record.ts or 0.0
        if record.kind != "stored":
            return ts
        if to_medium(record.medium) != MEDIUM_GPU or record.group_idx:
            return ts
        hashes = record.block_hashes or []
        if not hashes or record.block_size is None:
            raise ValueError("stored blocks without hashes or block_size")
        check_ids(hashes, "block hash")
        block_size = check_block_size(record.block_size, self.block_size)
        parent = record.parent_block_hash
        if parent is not None and parent not in self._parents:
            raise ValueError(f"the parent {parent:016x} was not recorded")
        if parent in hashes or len(set(hashes)) != len(hashes):
            raise ValueError("blocks are their own parents")
        # A hash always has the same parent; the first one counts, so that there are no cycles.
        for one in hashes:
            self._parents.setdefault(one, parent)
            parent = one
        self._add(ts, line, record.parent_block_hash, hashes, block_size)
        self.block_size = block_size
        return ts

    def _add(self, ts: float, line: int, parent: int | None, hashes: list[int], block_size: int) -> None:
        access = None if parent is None else self._open.get(parent)
        is_new = access is None or ts - access.last_ts > CONTINUES_WITHIN_S
        if access is None or is_new:
            access = _Access(line, ts, ts, [] if parent is None else self._list_ancestors(parent))
        check_lengths((len(access.blocks) + len(hashes)) * block_size, 0, ts * 1000)
        if is_new:
            self._accesses.append(access)
        if parent is not None:
            self._open.pop(parent, None)
        access.blocks += hashes
        access.last_ts = max(access.last_ts, ts)
        self._open[hashes[-1]] = access

    def _list_ancestors(self, block_hash: int) -> list[int]:
        found = []
        one: int | None = block_hash
        while one is not None:
            found.append(one)
            one = self._parents[one]
        found.reverse()
        return found

    def _take_before(self, last_ts: float) -> Iterator[TraceRequest]:
        """Yield the first accesses, as long as they cannot go on after `last_ts`."""
        while self._accesses and self._accesses[0].last_ts < last_ts:
            access = self._accesses.popleft()
            if self._open.get(access.blocks[-1]) is access:
                del self._open[access.blocks[-1]]
            assert self.block_size is not None
            num_tokens = len(access.blocks) * self.block_size
            yield TraceRequest(access.line, access.ts * 1000, num_tokens, hash_ids=access.blocks)
