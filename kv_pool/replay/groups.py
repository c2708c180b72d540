"""`parse_groups`: the KV cache groups of a model, written as `full,window:1024`."""

from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

FORMAT = "full, window:TOKENS, chunked:TOKENS or mamba, with commas between several"


def parse_groups(text: str, block_size: int) -> list[KVCacheSpec]:
    """The groups in the order in which they are written, all of the same block size.

    `full,window:1024,window:1024` is a model of which every third layer attends to all tokens and the others
    to 1,024: each group has an equal share of the layers.
    Raises:
        InvalidArgumentError: written in another way.
    """
    return [_parse_group(part.strip(), block_size, text) for part in text.split(",")]


def _parse_group(part: str, block_size: int, text: str) -> KVCacheSpec:
    kind, colon, tokens = part.partition(":")
    if part == "full":
        return FullAttentionSpec(block_size=block_size)
    if part == "mamba":
        return MambaSpec(block_size=block_size)
    # int() takes more than digits: signs, spaces, underscores.
    if kind in ("window", "chunked") and colon and tokens.isascii() and tokens.isdigit() and int(tokens):
        if kind == "window":
            return SlidingWindowSpec(block_size=block_size, sliding_window=int(tokens))
        return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=int(tokens))
    raise InvalidArgumentError(f"{part!r} in groups {text!r} is no group; write {FORMAT}")
