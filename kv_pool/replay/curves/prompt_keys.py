"""`read_prompt_keys`: the prompts of a trace as packed block keys, without objects per block."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kv_pool.errors import TraceError
from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.trace import Trace, TraceRequest

_ID_BYTES = 8
_HASH_BYTES = 16
_UNKNOWN = np.uint64(1 << 63)


@dataclass(slots=True)
class PromptKeys:
    """The cacheable blocks of one prompt, and the numbers that decide its hits.

    Attributes:
        keys: one key of fixed width for each cacheable block, head first. Equal keys are equal prefixes.
        num_cacheable: number of cacheable blocks.
        num_blocks: blocks that the prompt occupies while it runs, including a block without a hash.
        max_hit: maximum number of leading blocks that can be a hit.
        num_tokens: tokens that the prompt has in the pool: those of all its ids if ids are blocks, otherwise
            `input_length`.
        input_length: prompt tokens.
        output_length: generated tokens, which have no keys.
        arrival_ms: milliseconds since the trace's first request.
        line: the request's line in the trace, from 1.
        session_id: the request's conversation, or None.
    """

    keys: bytes
    num_cacheable: int
    num_blocks: int
    max_hit: int
    num_tokens: int
    input_length: int
    output_length: int
    arrival_ms: float
    line: int
    session_id: str | None


def find_key_bytes(trace: Trace, block_size: int) -> int:
    """Return the width of the keys of this trace in bytes."""
    return _ID_BYTES if trace.block_size and block_size % trace.block_size == 0 else _HASH_BYTES


def read_prompt_keys(settings: ReplaySettings, trace: Trace, block_size: int) -> Iterator[PromptKeys]:
    """Yield the prompts of the trace, up to the limit, in order.

    The keys are made of the trace's hash ids if the pool's block size is a multiple or a divisor of the
    trace's, and are otherwise the block hashes of a replay, which takes several times longer.

    Raises:
        TraceError: the trace cannot be read, or it mixes hash ids and token ids.
    """
    id_tokens = trace.block_size
    if id_tokens is not None and (block_size % id_tokens == 0 or id_tokens % block_size == 0):
        for traced in islice(trace, settings.limit):
            yield _pack_hash_ids(traced, id_tokens, block_size, settings.convention)
        return
    for request in settings.read_requests(trace, block_size):
        num_cacheable = len(request.block_hashes)
        yield PromptKeys(
            b"".join([block_hash.rjust(_HASH_BYTES, b"\0") for block_hash in request.block_hashes]),
            num_cacheable,
            -(-request.num_tokens // block_size),
            min(request.max_hit_tokens // block_size, num_cacheable),
            request.num_tokens,
            request.input_length,
            request.num_output_left,
            request.arrival_ms,
            request.number,
            request.session_id,
        )


def _pack_hash_ids(traced: TraceRequest, id_tokens: int, block_size: int, convention: str) -> PromptKeys:
    """Return a prompt of hash ids. The numbers are those of `ReplayRequest` and of the manager."""
    ids = traced.hash_ids
    if ids is None:
        raise TraceError(f"line {traced.line} has token ids in a trace of hash ids; a curve needs one kind")
    num_tokens = len(ids) * id_tokens if convention.startswith("ids_as_blocks") else traced.input_length
    num_cacheable = num_tokens // block_size
    max_hit_tokens = traced.input_length - 1 if convention.endswith("_cap") else num_tokens
    ids_per_block = block_size // id_tokens
    if ids_per_block:
        wanted = ids if ids_per_block == 1 else ids[ids_per_block - 1 :: ids_per_block]
        keys = array("Q", wanted if len(wanted) == num_cacheable else wanted[:num_cacheable]).tobytes()
    else:
        keys = _split_ids(ids, id_tokens // block_size, num_cacheable, traced.line)
    return PromptKeys(
        keys,
        num_cacheable,
        -(-num_tokens // block_size),
        min(max_hit_tokens // block_size, num_cacheable),
        num_tokens,
        traced.input_length,
        traced.output_length,
        traced.arrival_ms,
        traced.line,
        traced.session_id,
    )


def _split_ids(ids: list[int], blocks_per_id: int, num_blocks: int, line: int) -> bytes:
    """Return the keys (hash id, number of the block in it) of blocks smaller than those of the trace.

    Full blocks after the last id have content that the trace does not tell; each gets a key of its own.
    """
    num_known = min(num_blocks, len(ids) * blocks_per_id)
    keys = np.empty((num_blocks, 2), dtype=np.uint64)
    keys[:num_known, 0] = np.repeat(np.array(ids, dtype=np.uint64), blocks_per_id)[:num_known]
    keys[:num_known, 1] = np.arange(num_known, dtype=np.uint64) % np.uint64(blocks_per_id)
    keys[num_known:, 0] = line
    keys[num_known:, 1] = np.arange(num_known, num_blocks, dtype=np.uint64) + _UNKNOWN
    return keys.tobytes()
