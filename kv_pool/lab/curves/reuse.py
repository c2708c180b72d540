"""`PromptKeys`: the blocks of a prompt. `Reuse`: which request used each of them last, for curves.

The prompts of a trace share prefixes only, so the blocks that a request used and that no later request has
used since are one interval of its prompt. A prompt is therefore a few consecutive pieces, head first, each
with the request that used it last, and a new tail:

    request 0   |------------- new -------------|              6 blocks, no pieces
    request 1   |---- used by 0 ----|---- new ----|            one piece: (0, end 4)
    request 2   |---- used by 1 ----| used by 0 |-- new --|    two pieces: (1, end 4), (0, end 6)

The number of pieces is O(requests * log requests), as in the access operation of link-cut trees (Sleator and
Tarjan, 1983), whatever the number of blocks.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from kv_pool.errors import TraceError
from kv_pool.lab.settings import ReplayTrace
from kv_pool.threads import Workers

_ID_BYTES = 8
_UNKNOWN = np.uint64(1 << 63)


class PromptSize(NamedTuple):
    """The numbers of a prompt that decide its hits.

    Attributes:
        num_cacheable: number of cacheable blocks, generated ones included if the curve has them.
        num_blocks: blocks that the request occupies while it runs, including a block without a hash.
        max_hit: maximum number of leading blocks that can be a hit.
        input_length: prompt tokens.
    """

    num_cacheable: int
    num_blocks: int
    max_hit: int
    input_length: int


Numbers = tuple[int, int, int, int]
"""The numbers of a `PromptSize`, in passes over all requests, in which each object costs time."""


class PromptSizes:
    """The sizes of prompts, in 32 bytes each."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def __iter__(self) -> Iterator[Numbers]:
        """Yield the numbers of each prompt."""
        return zip(*[iter(self._numbers)] * 4, strict=True)

    def list_all(self, name: str) -> "array[int]":
        """Return one of the numbers of all prompts."""
        return self._numbers[PromptSize._fields.index(name) :: 4]

    def count_totals(self) -> tuple[int, int]:
        """Return the cacheable blocks and the prompt tokens of all prompts."""
        return sum(self.list_all("num_cacheable")), sum(self.list_all("input_length"))

    def append(self, size: PromptSize) -> None:
        """Add the size of the next prompt."""
        self._numbers.extend(size)


@dataclass(slots=True)
class PromptKeys:
    """The cacheable blocks of one prompt.

    Attributes:
        keys: one key of `find_key_bytes` for each cacheable block of the prompt, head first. Equal keys are
            equal prefixes.
        size: its numbers.
        arrival_ms: milliseconds since the trace's first request.
        line: the request's line in the trace, from 1.
        session_id: the request's conversation, or None.
    """

    keys: bytes
    size: PromptSize
    arrival_ms: float
    line: int
    session_id: str | None


def find_key_bytes(trace: ReplayTrace) -> int:
    """Return the width of the keys of this trace in bytes."""
    return _ID_BYTES if trace.block_size and trace.pool_block_size % trace.block_size == 0 else 2 * _ID_BYTES


def read_prompt_keys(trace: ReplayTrace, *, has_output: bool = False) -> Iterator[PromptKeys]:
    """Yield the prompts of the trace, up to the limit, in order. The numbers are those of `ReplayRequest`.

    Args:
        has_output: the blocks of generated tokens are cached after those of the prompt. They have no keys.
    Raises:
        TraceError: the trace cannot be read.
    """
    block_size, convention = trace.pool_block_size, trace.settings.convention
    key_bytes = find_key_bytes(trace)
    for traced in trace.read_traced():
        num_tokens = traced.input_length
        if traced.hash_ids is None or trace.block_size is None:
            keys = b"".join(one[:key_bytes] for one in trace.hasher.hash_blocks(traced.token_ids or []))
        else:
            if convention.startswith("ids_as_blocks"):
                num_tokens = len(traced.hash_ids) * trace.block_size
            keys = _pack_ids(
                traced.hash_ids, trace.block_size, block_size, num_tokens // block_size, traced.line
            )
        max_hit_tokens = traced.input_length - 1 if convention.endswith("_cap") else num_tokens
        total = num_tokens + (traced.output_length if has_output else 0)
        size = PromptSize(
            total // block_size,
            -(-total // block_size),
            min(max_hit_tokens, num_tokens) // block_size,
            traced.input_length,
        )
        yield PromptKeys(keys, size, traced.arrival_ms, traced.line, traced.session_id)


def _pack_ids(ids: list[int], id_tokens: int, block_size: int, num_blocks: int, line: int) -> bytes:
    """Return the keys of the first blocks of a prompt of hash ids, as in `hash_ids_to_block_hashes`.

    A key is the id of the trace's block in which the block ends, and, where several may end in it, the number
    of those before. Full blocks after the last id have unknown content; each has a key of its own.
    """
    if block_size % id_tokens == 0:
        ids_per_block = block_size // id_tokens
        return array("Q", ids[ids_per_block - 1 : num_blocks * ids_per_block : ids_per_block]).tobytes()
    keys = np.empty((num_blocks, 2), dtype=np.uint64)
    num_known = min(num_blocks, len(ids) * id_tokens // block_size)
    last_tokens = np.arange(1, num_known + 1) * block_size - 1
    keys[:num_known, 0] = np.array(ids, np.uint64)[last_tokens // id_tokens]
    keys[:num_known, 1] = last_tokens % id_tokens // block_size
    keys[num_known:, 0] = line
    keys[num_known:, 1] = np.arange(num_known, num_blocks, dtype=np.uint64) + _UNKNOWN
    return keys.tobytes()


_NEEDED = (
    "a curve needs ids that identify the whole prefix up to the block. kv-pool sweep replays such a trace"
)


Piece = tuple[int, int]
"""The request that used a piece last, and the position in the prompt, in blocks, where the piece ends.

A request's first piece starts at 0, others where their predecessor ends.
"""


class Reuse:
    """The requests of a trace and their pieces. Requests are numbered from 0 in the order of the trace.

    Attributes:
        block_size: tokens per block.
        sizes: per request.
        num_distinct: number of distinct cacheable blocks.
        num_recomputed: number of times that a request uses a known block beyond its `max_hit`, and so
            computes a block that may be cached.
        on_share: called about a thousand times in each `list_pieces`, with the share of the requests so far.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.on_share: Callable[[float], object] = lambda share: None
        self.sizes = PromptSizes()
        self.num_distinct = 0
        self.num_recomputed = 0
        self._first_piece = array("q", [0])  # of each request; one more entry than requests
        self._owner = array("q")
        self._end = array("q")

    def __len__(self) -> int:
        return len(self._first_piece) - 1

    @property
    def largest_request(self) -> int:
        """Blocks of the largest request: a pool of this capacity refuses none."""
        return max(self.sizes.list_all("num_blocks"), default=0)

    def append(self, size: PromptSize, pieces: Sequence[Piece]) -> None:
        """Add the next request."""
        num_known = pieces[-1][1] if pieces else 0
        self.sizes.append(size)
        for owner, end in pieces:
            self._owner.append(owner)
            self._end.append(end)
        self._first_piece.append(len(self._owner))
        self.num_distinct += size.num_cacheable - num_known
        self.num_recomputed += max(0, num_known - size.max_hit)

    def list_pieces(self) -> Iterator[tuple[Numbers, list[Piece]]]:
        """Yield each request's numbers and its pieces."""
        pieces = zip(self._owner, self._end, strict=True)
        step = max(1, len(self) // 1000)
        for number, (size, (first, last)) in enumerate(
            zip(self.sizes, pairwise(self._first_piece), strict=True)
        ):
            if number % step == 0:
                self.on_share(number / len(self))
            yield size, list(islice(pieces, last - first))


def admit(reuse: Reuse, capacity: int) -> Reuse:
    """Return the requests that fit into `capacity` blocks, renumbered, with their pieces among each other.

    Cost: O(pieces).
    """
    if capacity >= reuse.largest_request:
        return reuse
    admitted = Reuse(reuse.block_size)
    admitted.on_share = reuse.on_share
    number_of: list[int] = []  # -1 for a refused request
    pieces_of_refused: dict[int, list[Piece]] = {}
    for number, (numbers, known) in enumerate(reuse.list_pieces()):
        size = PromptSize(*numbers)
        pieces: list[Piece] = []
        start = 0
        for owner, end in known:
            if number_of[owner] >= 0:
                _append_piece(pieces, number_of[owner], end)
            else:
                for earlier, earlier_end in pieces_of_refused[owner]:
                    if earlier_end > start:
                        _append_piece(pieces, earlier, min(earlier_end, end))
                    if earlier_end >= end:
                        break
            start = end
        if size.num_blocks > capacity:
            number_of.append(-1)
            pieces_of_refused[number] = pieces
        else:
            number_of.append(len(admitted))
            admitted.append(size, pieces)
    return admitted


def _append_piece(pieces: list[Piece], owner: int, end: int) -> None:
    if pieces and pieces[-1][0] == owner:
        pieces[-1] = (owner, end)
    else:
        pieces.append((owner, end))


@dataclass(slots=True)
class _Rest:
    """The blocks of a request that no later request has used: their keys, and where they start."""

    owner: int
    start: int
    keys: bytes


class ReuseRecorder:
    """Finds the pieces of prompts, one prompt at a time.

    Args:
        block_size: tokens per block.
        key_bytes: width of the prompts' keys.

    Cost: one comparison of memory per prompt, and memory for one key per distinct block.
    """

    def __init__(self, block_size: int, key_bytes: int) -> None:
        self._key_bytes = key_bytes
        self._reuse = Reuse(block_size)
        self._rests: dict[bytes, _Rest] = {}  # by their first key
        self._new_keys: list[bytes] = []

    def add(self, prompt: PromptKeys) -> None:
        """Add the next prompt of the trace. Raises TraceError if a key has another position than before."""
        rests, keys, key_bytes = self._rests, prompt.keys, self._key_bytes
        pieces: list[Piece] = []
        place = 0
        while place < len(keys):
            rest = rests.pop(keys[place : place + key_bytes], None)
            if rest is None:
                break
            if rest.start * key_bytes != place:
                raise TraceError(
                    f"line {prompt.line}: block {place // key_bytes} of the prompt has the id of a block "
                    f"with another prefix; {_NEEDED}"
                )
            num_equal = _count_equal(keys, place, rest.keys, key_bytes)
            place += num_equal
            pieces.append((rest.owner, place // key_bytes))
            if num_equal < len(rest.keys):
                rest.start = place // key_bytes
                rest.keys = rest.keys[num_equal:]
                rests[rest.keys[:key_bytes]] = rest
        if place < len(keys):
            self._new_keys.append(keys[place:] if place else keys)
        if keys:
            rests[keys[:key_bytes]] = _Rest(len(self._reuse), 0, keys)
        self._reuse.append(prompt.size, pieces)

    def finish(self) -> Reuse:
        """Return the pieces of all prompts.

        Raises:
            TraceError: a block occurs after two different prefixes, so its key does not identify a prefix.
            OutOfThreadsError: the system cannot start another thread.
        """
        # In another thread: a signal such as Ctrl-C would wait for the sort, of seconds for a long trace.
        workers = Workers("kv_pool curve", 1)
        try:
            counted = workers.submit(partial(_count_distinct, self._new_keys, self._key_bytes))
            num_distinct = counted.result()
        finally:
            workers.stop()
        if num_distinct != sum(map(len, self._new_keys)) // self._key_bytes:
            raise TraceError(f"a block occurs after two different prefixes, or twice in a prompt; {_NEEDED}")
        return self._reuse


def _count_equal(keys: bytes, place: int, other: bytes, key_bytes: int) -> int:
    """Return the bytes of the whole keys in which `keys[place:]` and `other` agree from the start."""
    if keys.startswith(other, place):
        return len(other)
    most = min(len(other), len(keys) - place)
    differ = np.frombuffer(keys, np.uint8, most, place) != np.frombuffer(other, np.uint8, most)
    num_equal = int(differ.argmax()) if differ.any() else most
    return num_equal // key_bytes * key_bytes


def _count_distinct(new_keys: list[bytes], key_bytes: int) -> int:
    keys = np.frombuffer(b"".join(new_keys), dtype=np.uint64).reshape(-1, key_bytes // _ID_BYTES)
    # Much faster in one column; np.unique, which hashes since NumPy 2.3, takes ten times as long.
    keys = np.sort(keys, axis=0) if key_bytes == _ID_BYTES else keys[np.lexsort(keys.T)]
    return len(keys) and 1 + int(np.count_nonzero((keys[1:] != keys[:-1]).any(axis=1)))
