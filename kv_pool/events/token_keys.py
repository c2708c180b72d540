"""Names for blocks by what is in them, whatever the engine hashes with: tokens, adapter, extra keys.

The names live in one process and say nothing elsewhere. 64 bits without a secret: someone who tries can make
two prompts share a name, which costs a router a miss and nobody their data.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from kv_pool.core.token_packing import pack_fixed

_ENCODE = msgspec.msgpack.Encoder().encode


def root_key(lora_name: str | None) -> int:
    """The parent of every first block of this adapter."""
    return xxhash.xxh3_64_intdigest(b"" if lora_name is None else b"lora " + lora_name.encode())


def chain_keys(
    parent: int,
    token_ids: Sequence[int],
    block_size: int,
    extra_keys: Sequence[Sequence[Any] | None] | None,
    lora_name: str | None,
) -> list[int]:
    """The keys of the full blocks of `token_ids`, each made of its parent's, its tokens and its extra keys.

    Args:
        parent: key of the block before the first token, or `root_key`.
        extra_keys: one entry per block as events carry it; may be shorter. The adapter's name, which comes
            first in each entry where there is an adapter, may be left out.
    Raises: InvalidArgumentError, InvalidTypeError: a token that is none.
    """
    digest = xxhash.xxh3_64_intdigest
    num_extras = len(extra_keys) if extra_keys else 0
    keys: list[int] = []
    for position, packed in enumerate(pack_fixed(token_ids, block_size)):
        packed += parent.to_bytes(8, "little")
        if extra_keys and position < num_extras:
            extra = extra_keys[position]
            if extra and lora_name is not None and extra[0] == lora_name:
                extra = extra[1:]
            if extra:
                packed += _ENCODE(extra)
        parent = digest(packed)
        keys.append(parent)
    return keys
