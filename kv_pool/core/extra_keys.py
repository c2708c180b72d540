"""Extra keys: what, besides its tokens, decides whether a block's KV can be shared.

Tagged as in vLLM 0.33, in this order: `("lora", name, path)`, one `("mm", identifier, offset)` per
multimodal input that reaches into the block (offset = its start minus the block's, may be negative), and
`("cache_salt", salt)` in the first block of a sequence only.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from kv_pool.errors import InvalidTypeError
from kv_pool.ids import BlockHash

ExtraKeys = tuple[tuple[Any, ...], ...]


class CacheableRequest(Protocol):
    """What the pool reads of a request. With events off only `block_hashes`."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One per `hash_block_size` tokens, head first; may grow between calls."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output so far. A slice of it goes into events and must be a list."""

    @property
    def lora_request(self) -> Any:
        """None, or an object with `adapter_id`, `name`, `lora_name`, `lora_path`."""

    @property
    def mm_features(self) -> Sequence[Any] | None:
        """Multimodal inputs by offset, each with `identifier` and `mm_position.offset`, `.length`."""

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share blocks."""

    @property
    def session_id(self) -> str | None:
        """Goes into events."""


def find_extra_keys(request: CacheableRequest, start: int, end: int) -> ExtraKeys | None:
    """The extra keys of the block that holds tokens `[start, end)` of `request`; None for none."""
    keys: list[tuple[Any, ...]] = []
    lora = request.lora_request
    if lora:
        keys.append(("lora", lora.lora_name, lora.lora_path))
    for feature in request.mm_features or ():
        offset = feature.mm_position.offset
        if offset >= end:
            break
        if offset + feature.mm_position.length > start:
            keys.append(("mm", feature.identifier, offset - start))
    salt = request.cache_salt
    if start == 0 and salt:
        keys.append(("cache_salt", salt))
    return tuple(keys) if keys else None


def check_announceable(request: CacheableRequest) -> None:
    """Read whatever an event about `request` will need.

    Raises:
        InvalidTypeError: something is not there or not what it should be; says what.
    """
    try:
        find_extra_keys(request, 0, 1)
        lora = request.lora_request
        read: list[Any] = [request.session_id, list(request.all_token_ids[0:0])]
        if lora:
            read += [lora.adapter_id, lora.name]
        for feature in request.mm_features or ():
            read += [feature.identifier, feature.mm_position.offset + feature.mm_position.length]
    except (AttributeError, TypeError) as error:
        raise InvalidTypeError(f"the request can not be announced in an event: {error}") from error


def untag_extra_keys(keys: ExtraKeys | None) -> tuple[Any, ...] | None:
    """The keys as events carry them: adapter name, `(identifier, offset)`, salt."""
    if keys is None:
        return None
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys)
