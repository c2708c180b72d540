"""Pack token ids into the bytes to hash: one pass per prompt, one piece per full block."""

from array import array
from sys import byteorder
from typing import Any

from kv_pool.core.arguments import refuse_type
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import TokenIds

MAX_TOKEN_ID = 2**64 - 1

# Below this many tokens numpy's fixed cost exceeds what it saves.
_VECTORIZE_FROM = 128


def pack_fixed(token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Pack each full block's tokens as 8-byte little-endian integers. A partial last block is left out.

    Raises:
        InvalidArgumentError: a token id is negative or needs more than 64 bits; the message names it.
        InvalidTypeError: a token id is not an integer; the message names it.
    """
    words = _to_words(token_ids)
    if byteorder == "big":
        words.byteswap()
    packed = words.tobytes()
    step = 8 * block_size
    return [packed[start : start + step] for start in range(0, len(packed) - step + 1, step)]


def check_token_ids(token_ids: TokenIds) -> list[int]:
    """Return the token ids as a list of ints. Raises: as `pack_fixed`."""
    checked: list[int] = _to_words(token_ids).tolist()
    return checked


def pack_cbor(token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Pack each full block's tokens as a canonical CBOR array of integers (RFC 7049 section 3.9).

    Raises: as `pack_fixed`.
    """
    words = _to_words(token_ids)
    num_blocks = len(words) // block_size
    if num_blocks * block_size >= _VECTORIZE_FROM:
        return _pack_cbor_vectorized(words, block_size, num_blocks)
    from cbor2 import dumps

    return [
        dumps(words[index * block_size : (index + 1) * block_size].tolist(), canonical=True)
        for index in range(num_blocks)
    ]


def _pack_cbor_vectorized(words: Any, block_size: int, num_blocks: int) -> list[bytes]:
    import numpy as np
    from cbor2 import dumps

    # The header of an array of `block_size` items: encode zeros, one byte each, and cut them off.
    header = dumps([0] * block_size, canonical=True)[:-block_size]
    tokens = np.frombuffer(words, dtype=np.uint64)[: num_blocks * block_size]
    # An integer up to 23 takes 1 byte; a larger one takes a head byte and 1, 2, 4 or 8 more.
    widths = np.ones(len(tokens), dtype=np.int64)
    for bound, extra in ((24, 1), (1 << 8, 1), (1 << 16, 2), (1 << 32, 4)):
        widths += extra * (tokens >= bound)
    ends = np.cumsum(widths)
    starts = ends - widths
    out = np.empty(int(ends[-1]), dtype=np.uint8)
    for width, head in ((1, 0), (2, 0x18), (3, 0x19), (5, 0x1A), (9, 0x1B)):
        chosen = np.flatnonzero(widths == width)
        if not len(chosen):
            continue
        places = starts[chosen]
        if width == 1:
            out[places] = tokens[chosen]
            continue
        out[places] = head
        big_endian = tokens[chosen].astype(">u8").view(np.uint8).reshape(-1, 8)
        out[places[:, None] + np.arange(1, width)] = big_endian[:, 9 - width :]
    packed = out.tobytes()
    bounds = [0, *ends[block_size - 1 :: block_size].tolist()]
    return [header + packed[bounds[i] : bounds[i + 1]] for i in range(num_blocks)]


def _to_words(token_ids: TokenIds) -> Any:
    """Return the token ids as an array of unsigned 64-bit integers. Raises: as `pack_fixed`."""
    listed: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    if isinstance(listed, (bytes, bytearray)):
        listed = list(listed)  # array() would take them for packed words
    try:
        return array("Q", listed)
    except (OverflowError, TypeError) as error:
        if isinstance(listed, str) or not hasattr(listed, "__iter__"):
            refuse_type("token_ids", token_ids, "a sequence of int")
        for position, token_id in enumerate(listed):
            if not hasattr(token_id, "__index__"):
                raise InvalidTypeError(
                    f"token_ids[{position}] is of type {type(token_id).__name__}; expected int"
                ) from error
            if token_id < 0 or token_id > MAX_TOKEN_ID:
                raise InvalidArgumentError(
                    f"token {position} is {token_id}; token ids are in 0..2**64-1"
                ) from error
        raise
