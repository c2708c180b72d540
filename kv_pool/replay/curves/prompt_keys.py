"""`read_prompt_keys`: the prompts of a trace as packed block keys, without objects per block."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kv_pool.replay.settings import ReplaySettings
from kv_pool.replay.trace import Trace, TraceRequest

_ID_BYTES = 8
_HASH_BYTES = 16


@dataclass(slots=True)
class PromptKeys:
    """The cacheable blocks of one prompt, and the numbers that decide its hits.

    Attributes:
        keys: one key of fixed width for each cacheable block, head first. Equal keys are equal prefixes.
        num_cacheable: number of cacheable blocks.
        num_blocks: blocks that the prompt occupies while it runs, including a block without a hash.
        max_hit: maximum number of leading blocks that can be a hit.
        input_length: prompt tokens.
        line: the request's line in the trace, from 1.
        session_id: the request's conversation, or None.
    """

    keys: bytes
    num_cacheable: int
    num_blocks: int
    max_hit: int
    input_length: int
    line: int
    session_id: str | None


def find_key_bytes(trace: Trace, block_size: int) -> int:
    """Return the width of the keys of this trace in bytes."""
    return _ID_BYTES if trace.block_size == block_size else _HASH_BYTES


def read_prompt_keys(settings: ReplaySettings, trace: Trace, block_size: int) -> Iterator[PromptKeys]:
    """Yield the prompts of the trace, up to the limit, in order.

    The keys are the trace's hash ids if the pool's blocks have the same size as the trace's, or else the
    block hashes of a replay. Raises TraceError.
    """
    if trace.block_size == block_size:
        for traced in islice(trace, settings.limit):
            yield _pack_hash_ids(traced, block_size, settings.convention)
        return
    for request in settings.read_requests(trace, block_size):
        num_cacheable = len(request.block_hashes)
        yield PromptKeys(
            b"".join([block_hash.rjust(_HASH_BYTES, b"\0") for block_hash in request.block_hashes]),
            num_cacheable,
            -(-request.num_tokens // block_size),
            min(request.max_hit_tokens // block_size, num_cacheable),
            request.input_length,
            int(request.request_id),
            request.session_id,
        )


def _pack_hash_ids(traced: TraceRequest, block_size: int, convention: str) -> PromptKeys:
    ids = traced.hash_ids or []
    input_length = traced.input_length
    if convention.startswith("ids_as_blocks"):
        num_cacheable = num_blocks = len(ids)
    else:
        num_cacheable = input_length // block_size
        num_blocks = -(-input_length // block_size)
    max_hit = num_cacheable
    if convention.endswith("_cap"):
        max_hit = min(max_hit, (input_length - 1) // block_size)
    keys = array("Q", ids if len(ids) == num_cacheable else ids[:num_cacheable]).tobytes()
    return PromptKeys(keys, num_cacheable, num_blocks, max_hit, input_length, traced.line, traced.session_id)
