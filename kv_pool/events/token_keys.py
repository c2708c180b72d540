"""Content keys of blocks, independent of the engine's hash: tokens, adapter, extra keys.

The keys are valid in one process only. They have 64 bits and no secret: a malicious sender can make two
prompts share a key, which costs a router a cache miss but exposes no data.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash
from mypy_extensions import i64

from kv_pool.core.block import COMPILED
from kv_pool.core.token_packing import check_token_ids

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_TOKENS = msgspec.msgpack.Decoder(list[int]).decode


def root_key(lora_name: str | None) -> Any:
    """Return the parent key of first blocks with this adapter."""
    return xxhash.xxh3_64_intdigest(b"" if lora_name is None else b"lora " + lora_name.encode())


def chain_keys(
    parent: Any,
    token_ids: Any,
    block_size: int,
    extra_keys: Sequence[Sequence[Any] | None] | None,
    lora_name: str | None,
) -> list[Any]:
    """Return the keys of the full blocks of `token_ids`; each covers its parent, tokens and extra keys.

    Args:
        parent: key of the block before the first token, or `root_key`.
        token_ids: a sequence of ints, or the bytes of a msgpack array of them.
        extra_keys: one entry per block, as in events; may be shorter. The adapter's name, the first element
            of each entry if there is an adapter, may be omitted.
    Raises: InvalidArgumentError, InvalidTypeError: a token that is not an unsigned 64-bit integer.
    """
    digest = xxhash.xxh3_64_intdigest
    keys: list[Any] = []
    if not extra_keys or not any(extra_keys):
        for packed in pack_blocks(token_ids, block_size):
            parent = digest(packed, parent)
            keys.append(parent)
        return keys
    num_extras = len(extra_keys)
    for position, packed in enumerate(pack_blocks(token_ids, block_size)):
        if position < num_extras:
            extra = extra_keys[position]
            if extra and lora_name is not None and extra[0] == lora_name:
                extra = extra[1:]
            if extra:
                packed += _ENCODE(extra)
        parent = digest(packed, parent)
        keys.append(parent)
    return keys


def pack_blocks(token_ids: Any, block_size: int) -> list[bytes]:
    """Return each full block's tokens as msgpack integers in their shortest form. Raises: as `chain_keys`."""
    if COMPILED:
        packed = token_ids if isinstance(token_ids, bytes) else encode_list(token_ids)
        blocks = None if packed is None else split_packed(packed, block_size)
        if blocks is not None:
            return blocks
    if isinstance(token_ids, bytes):
        token_ids = _DECODE_TOKENS(token_ids)
    listed = check_token_ids(token_ids)
    header = len(_ENCODE([0] * block_size)) - block_size
    ends = range(block_size, len(listed) + 1, block_size)
    return [_ENCODE(listed[end - block_size : end])[header:] for end in ends]


def encode_list(token_ids: Any) -> bytes | None:
    """Return token ids as a msgpack array; None if an element cannot be encoded as it is."""
    if not isinstance(token_ids, list):
        token_ids = token_ids.tolist() if hasattr(token_ids, "tolist") else [*token_ids]
    try:
        return _ENCODE(token_ids)
    except (TypeError, ValueError, OverflowError):
        return None


def count_packed(packed: bytes) -> int:
    """Return the number of elements of a msgpack array; -1 if the bytes are something else."""
    size = len(packed)
    head = packed[0] if size else 0
    if 0x90 <= head <= 0x9F:
        return head & 0xF
    if head == 0xDC and size >= 3:
        return packed[1] << 8 | packed[2]
    if head == 0xDD and size >= 5:
        return int.from_bytes(packed[1:5], "big")
    return -1


def split_packed(packed: bytes, block_size: int) -> list[bytes] | None:
    """Return the bytes of each full block of a msgpack array of unsigned integers.

    None if an element is not an unsigned integer in its shortest form: equal tokens would then not have equal
    bytes. Written for the compiled build; in plain Python encoding block by block is faster.
    """
    num_tokens = count_packed(packed)
    if num_tokens < 0 or block_size < 1:
        return None
    size: i64 = len(packed)
    head: i64 = packed[0]
    at: i64 = 1 if head < 0xDC else 3 if head == 0xDC else 5
    end: i64 = at
    num_left: i64 = 0
    blocks: list[bytes] = []
    for _ in range(num_tokens // block_size):
        start: i64 = at
        num_left = block_size
        while num_left > 0:
            num_left -= 1
            if at >= size:
                return None
            head = packed[at]
            if head == 0xCE:
                end = at + 5
                if end > size or (packed[at + 1] == 0 and packed[at + 2] == 0):
                    return None
            elif head == 0xCD:
                end = at + 3
                if end > size or packed[at + 1] == 0:
                    return None
            elif head < 0x80:
                end = at + 1
            elif head == 0xCC:
                end = at + 2
                if end > size or packed[at + 1] < 0x80:
                    return None
            elif head == 0xCF:
                end = at + 9
                if end > size or packed[at + 1 : at + 5] == b"\0\0\0\0":
                    return None
            else:
                return None
            at = end
        blocks.append(packed[start:at])
    return blocks
