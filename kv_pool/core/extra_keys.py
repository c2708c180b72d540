"""Extra keys: what a block's hash covers besides its tokens.

Tagged as in vLLM 0.33, in this order:

- `("lora", name, path)`;
- one `("mm", identifier, offset)` per multimodal input that overlaps the block, by offset (its start minus
  the block's start; may be negative);
- `("cache_salt", salt)`, in the first block of a sequence only;
- `("prompt_embeds", digest)`, the SHA-256 of the block's rows, if the prompt was given as embeddings.

A request with salts by region, which vLLM does not have, has two other kinds (see `salt_regions.py`):

- `("media", identifier, offset, length)` instead of `mm`;
- `("salt_region", salt, offset)` in the block in which a region starts, after `cache_salt`.

Hashes, but not events, also cover `("adapter_load", version or id)` as the last key of each block of a
request with an adapter: an adapter that is loaded again under its name may have other weights. vLLM's hashes
do not, so `sha256_cbor` has it only for an adapter with a `version`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from kv_pool.core.arguments import refuse_type
from kv_pool.core.salt_regions import read_salt_regions
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.ids import BlockHash

ExtraKeys = tuple[tuple[Any, ...], ...]


class CacheableRequest(Protocol):
    """The attributes of a request that the pool reads. With events off, it reads only `block_hashes`."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One hash per `hash_block_size` tokens, head first; may grow between calls."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens so far. Events carry a slice of it, which must be a list."""

    @property
    def lora_request(self) -> Any:
        """None, or an object with `adapter_id`, `name`, `lora_name`, `lora_path`; optional: `version`."""

    @property
    def mm_features(self) -> Sequence[Any] | None:
        """Multimodal inputs, each with `identifier` and `mm_position.offset`, `.length`; in any order."""

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share blocks."""

    # Optional: `session_id`, a string or None, reported in events; `salt_regions`, None or a sequence of
    # objects with `start` and `salt`; `prompt_embeds`, None or a tensor or array (num_tokens, hidden size),
    # and with it `_prompt_embeds_per_block_hashes`, a dict that caches each block's digest.


@dataclass(frozen=True)
class KnownTokens:
    """Stands for a request of which only the hashes, or the tokens of a block, are known."""

    block_hashes: Sequence[BlockHash]
    all_token_ids: Sequence[int]
    lora_request: Any = None
    mm_features: Sequence[Any] | None = None
    cache_salt: str | None = None


def read_hashes(request: CacheableRequest) -> Sequence[BlockHash]:
    """Return `request.block_hashes`. Raise InvalidTypeError if `request` has none."""
    unchecked: Any = request
    try:
        hashes: Sequence[BlockHash] = unchecked.block_hashes
    except AttributeError:
        refuse_type("request", request, "a request")
    return hashes


def has_extra_keys(request: CacheableRequest) -> bool:
    """Return True if any block of the request can have extra keys."""
    if request.lora_request or request.mm_features or request.cache_salt:
        return True
    # Compiled, `hasattr` of a missing attribute costs a small part of `getattr` with a default.
    unchecked: Any = request
    if hasattr(request, "prompt_embeds") and unchecked.prompt_embeds is not None:
        return True
    return hasattr(request, "salt_regions") and bool(unchecked.salt_regions)


def find_adapter_load(request: CacheableRequest, includes_id: bool) -> tuple[Any, ...] | None:
    """Return the key that tells apart two loads of one adapter: by its version, else by its id.

    None without an adapter, and for an adapter without a version unless `includes_id`.
    """
    lora = request.lora_request
    if not lora:
        return None
    load: Any = getattr(lora, "version", None)
    if load is None and includes_id:
        load = getattr(lora, "adapter_id", None)
    return None if load is None else ("adapter_load", load if isinstance(load, str) else int(load))


class ExtraKeysWalk:
    """A walk over a request's blocks, head first, that finds the extra keys of each.

    Cost: O(features + keys found) for the whole request, regardless of its number of blocks.
    """

    def __init__(self, request: CacheableRequest) -> None:
        self._request: CacheableRequest = request
        self._features: Sequence[Any] = sorted(
            request.mm_features or (), key=attrgetter("mm_position.offset")
        )
        self._num_passed: int = 0
        """Number of features that begin before the end of the last block."""
        self._open: list[tuple[int, int, Any]] = []
        """Those of them that end after the start of the last block: (offset, end, identifier)."""
        self._regions: list[tuple[int, str]] = read_salt_regions(request)
        self._num_regions_passed: int = 0
        """Number of salt regions that start before the last block."""

    def find(self, start: int, end: int) -> ExtraKeys | None:
        """Return the extra keys of the block that holds tokens `[start, end)`, or None.

        `start` and `end` must not decrease from call to call.
        """
        request = self._request
        keys: list[tuple[Any, ...]] = []
        lora = request.lora_request
        if lora:
            keys.append(("lora", lora.lora_name, lora.lora_path))
        if self._open:
            self._open = [feature for feature in self._open if feature[1] > start]
        while self._num_passed < len(self._features):
            feature = self._features[self._num_passed]
            offset: int = feature.mm_position.offset
            if offset >= end:
                break
            self._num_passed += 1
            feature_end: int = offset + feature.mm_position.length
            if feature_end > start or (self._regions and offset >= start):
                self._open.append((offset, feature_end, feature.identifier))
        for offset, feature_end, identifier in self._open:
            if self._regions:
                keys.append(("media", identifier, offset - start, feature_end - offset))
            else:
                keys.append(("mm", identifier, offset - start))
        salt = request.cache_salt
        if start == 0 and salt:
            keys.append(("cache_salt", salt))
        for number in range(self._num_regions_passed, len(self._regions)):
            first, salt = self._regions[number]
            if first >= end:
                break
            if first < start:
                self._num_regions_passed += 1
            else:
                keys.append(("salt_region", salt, first - start))
        if getattr(request, "prompt_embeds", None) is not None:
            keys.append(("prompt_embeds", _digest_embeds(request, start, end)))
        return tuple(keys) if keys else None


def find_extra_keys(request: CacheableRequest, start: int, end: int) -> ExtraKeys | None:
    """Return the extra keys of the block that holds tokens `[start, end)` of `request`, or None.

    Cost: O(features). For several blocks of a request, use one `ExtraKeysWalk`.
    """
    return ExtraKeysWalk(request).find(start, end)


def _digest_embeds(request: Any, start: int, end: int) -> bytes:
    """Return the SHA-256 of the embeddings of tokens `[start, end)`, cached per request and range."""
    digests = request._prompt_embeds_per_block_hashes
    digest: bytes | None = digests.get((start, end))
    if digest is None:
        rows = request.prompt_embeds[start:end]
        if hasattr(rows, "cpu"):
            # A torch tensor. numpy has no bfloat16, so view it as bytes; `.byte().dtype` is torch.uint8
            # without an import of torch.
            rows = rows.flatten().cpu().contiguous().view(rows[:0].byte().dtype).numpy()
        digest = hashlib.sha256(rows.tobytes()).digest()
        digests[start, end] = digest
    return digest


def check_announceable(request: CacheableRequest) -> None:
    """Check that `request` has everything that an event about it needs.

    Raises:
        InvalidTypeError: an attribute is missing or has the wrong type; the message names it.
        InvalidArgumentError: text has a lone surrogate, which events cannot encode.
    """
    try:
        find_extra_keys(request, 0, 1)
        lora = request.lora_request
        session_id = getattr(request, "session_id", None)
        read: list[Any] = [session_id, request.cache_salt, list(request.all_token_ids[0:0])]
        if lora:
            read += [lora.adapter_id, lora.name, lora.lora_name]
        for feature in request.mm_features or ():
            read += [feature.identifier, feature.mm_position.offset + feature.mm_position.length]
        for region in getattr(request, "salt_regions", None) or ():
            read.append(region.salt)
        for text in read:
            if isinstance(text, str):
                text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the request cannot be reported in an event: {error}") from error
    except (AttributeError, TypeError) as error:
        raise InvalidTypeError(f"the request cannot be reported in an event: {error}") from error


def untag_extra_keys(keys: ExtraKeys | None) -> tuple[Any, ...] | None:
    """Return the keys as events carry them: adapter name, `(identifier, offset)`, salt, digest.

    With salts by region, the length follows the pair of a multimodal input, and the offset of a region
    follows its salt. Both are integers of their own: readers of vLLM's events accept no longer arrays.
    """
    if keys is None:
        return None
    untagged: list[Any] = []
    for key in keys:
        kind: str = key[0]
        if kind == "mm":
            untagged.append(key[1:3])
        elif kind == "media":
            untagged += (key[1:3], key[3])
        elif kind == "salt_region":
            untagged += key[1:3]
        else:
            untagged.append(key[1])
    return tuple(untagged)
