"""`Request`: a sequence of tokens with the hashes of its full blocks, also as bytes for another process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import msgspec

from kv_pool.core.arguments import as_count, as_int, as_list, as_list_of, check_type, refuse_type
from kv_pool.core.block_hash import BlockHasher
from kv_pool.core.extra_keys import CacheableRequest
from kv_pool.core.salt_regions import check_region, read_salt_regions
from kv_pool.core.token_packing import check_token_ids
from kv_pool.errors import InvalidArgumentError, InvalidTypeError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.ids import BlockHash, RequestId, TokenIds


@dataclass(frozen=True)
class SaltRegion:
    """The tokens from `start` on are private: only requests with the same salt there share their blocks.

    A region ends where the next one starts, or with the request, generated tokens included. A block that any
    region touches is private; so are all blocks after it, because a hash covers all blocks before its own.

    Attributes:
        start: number of tokens before the region.
        salt: text, not empty, such as the id of a tenant. Secret if tenants can choose their own salts.

    Raises:
        InvalidTypeError: `start` is not an int, or `salt` not a string.
        InvalidArgumentError: `start` is negative, or `salt` is empty: a public region after a private one is
            impossible.
    """

    start: int
    salt: str

    def __post_init__(self) -> None:
        check_region(self.start, self.salt, 0)


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request. Its name, path and version keep its KV apart from that of other adapters.

    Attributes:
        version: names the weights, such as by a digest or a time; None: `adapter_id` does. Give a version
            where several processes, or runs with a disk tier, share blocks: their ids may differ for the same
            weights, or be the same for others. `sha256_cbor` hashes, like vLLM's, do not cover the id:
            there, an adapter that is loaded again with other weights needs a new version, or
            `KVCacheManager.evict_owned`.

    Raises:
        InvalidTypeError: an id that is not an int, or a name or path that is not a string. The arguments are
            not in the order of vLLM's class, whose first argument is the name.
    """

    adapter_id: int
    name: str
    path: str
    version: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None:
            check_type("version", self.version, str)
        for field, value, wanted in (
            ("adapter_id", self.adapter_id, SupportsIndex),
            ("name", self.name, str),
            ("path", self.path, str),
        ):
            if not isinstance(value, wanted):
                raise InvalidTypeError(
                    f"{field} is a {type(value).__name__}: {value!r}; LoRARequest takes adapter_id (int), "
                    "name and path (str) in this order; vLLM's class takes the name first"
                )

    @property
    def lora_name(self) -> str:
        return self.name

    @property
    def lora_path(self) -> str:
        return self.path


@dataclass(frozen=True)
class PlaceholderRange:
    """The tokens `[offset, offset + length)` of a prompt that stand for one multimodal input.

    Raises:
        InvalidArgumentError, InvalidTypeError: not two counts.
    """

    offset: int
    length: int

    def __post_init__(self) -> None:
        as_count("offset", self.offset)
        as_count("length", self.length)


@dataclass(frozen=True)
class MultiModalFeature:
    """One multimodal input; `identifier` is a digest of its content."""

    identifier: str
    mm_position: PlaceholderRange


class SchedulableRequest(CacheableRequest, Protocol):
    """The attributes of a request that `KVCacheManager` reads; an engine may pass a class of its own."""

    @property
    def request_id(self) -> RequestId:
        """The key of the block table; unique among the requests that hold blocks."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks; the scheduler increases it after each step."""


class Request:
    """A sequence of tokens with the hashes of its full blocks, kept up to date as it grows.

        >>> from kv_pool import BlockHasher, Request
        >>> request = Request("r0", [1, 2, 3, 4, 5], BlockHasher(block_size=4))
        >>> len(request.block_hashes)
        1
        >>> request.append_output_token_ids([6, 7, 8])
        >>> len(request.block_hashes), request.num_tokens
        (2, 8)

    Args:
        request_id: unique among the requests that hold blocks.
        prompt_token_ids: at least one token id, each in 0..2**64-1.
        hasher: its block size is the pool's `hash_block_size`.
        lora_request, mm_features, cache_salt: part of the hashes; see `core/extra_keys.py`.
        salt_regions: from which tokens on the prompt is private, and to whom; see `SaltRegion`.
            `cache_salt`, as in vLLM, makes all of it private.
        session_id: included in events.

    Attributes:
        num_computed_tokens: tokens whose KV is in the blocks. The scheduler sets it.
        kv_hints: for the pool's cache policy, by name; see `kv_pool/policies/README.md`.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt_token_ids: TokenIds,
        hasher: BlockHasher,
        *,
        lora_request: LoRARequest | None = None,
        mm_features: Sequence[MultiModalFeature] | None = None,
        cache_salt: str | None = None,
        session_id: str | None = None,
        salt_regions: Sequence[SaltRegion] | None = None,
    ) -> None:
        check_type("request_id", request_id, str)
        check_type("hasher", hasher, BlockHasher)
        if cache_salt is not None:
            check_type("cache_salt", cache_salt, str)
        if session_id is not None:
            check_type("session_id", session_id, str)
        self.request_id = request_id
        self.all_token_ids: list[int] = _to_list("prompt_token_ids", prompt_token_ids)
        if not self.all_token_ids:
            raise InvalidArgumentError(f"request {request_id!r} has an empty prompt; it needs a token")
        self.num_prompt_tokens = len(self.all_token_ids)
        self.lora_request = lora_request
        self.mm_features = mm_features
        self.cache_salt = cache_salt
        regions = () if salt_regions is None else salt_regions
        self.salt_regions = tuple(as_list_of("salt_regions", regions, SaltRegion)) or None
        read_salt_regions(self)
        self.session_id = session_id
        self.kv_hints: dict[str, Any] | None = None
        self.num_computed_tokens = 0
        self.block_hashes: list[BlockHash] = []
        self._hasher = hasher
        self.block_hashes.extend(hasher.hash_request(self))

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id!r}: {self.num_tokens} tokens, {self.num_prompt_tokens} of the "
            f"prompt, {self.num_computed_tokens} computed, {len(self.block_hashes)} block hashes>"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append_output_token_ids(self, token_ids: TokenIds) -> None:
        """Append generated tokens, and the hashes of the blocks that become full.

        Raises:
            InvalidArgumentError, InvalidTypeError: not token ids; or tokens were removed from
                `all_token_ids`, and their hashes are still there. Nothing has changed.
        """
        appended = check_token_ids(token_ids)
        tokens, hashes, hasher = self.all_token_ids, self.block_hashes, self._hasher
        num_tokens = len(tokens)
        if len(hashes) * hasher.block_size > num_tokens:
            raise InvalidArgumentError(
                f"request {self.request_id!r} has {num_tokens} tokens but hashes for "
                f"{len(hashes) * hasher.block_size}; withdraw tokens with truncate()"
            )
        tokens.extend(appended)
        if len(tokens) < (len(hashes) + 1) * hasher.block_size:
            return  # no block becomes full
        try:
            hashes.extend(hasher.hash_request(self))
        except Exception:
            del tokens[num_tokens:]
            raise

    def truncate(self, num_tokens: SupportsIndex) -> None:
        """Withdraw all tokens after the first `num_tokens`, with the hashes that cover them.

        For tokens that are not computed, such as the last sampled token of a session, which the next input
        replaces. `KVCacheManager.truncate` withdraws computed tokens from the blocks, too, and calls this.

            >>> from kv_pool import BlockHasher, Request
            >>> session = Request("session", [1, 2, 3], BlockHasher(block_size=4))
            >>> session.append_output_token_ids([99])
            >>> session.truncate(3)
            >>> len(session.block_hashes), session.all_token_ids
            (0, [1, 2, 3])

        Raises:
            InvalidArgumentError: fewer than 1 or more than all tokens would be left, or computed tokens would
                be withdrawn. Nothing has changed.
        """
        num_left = as_int("num_tokens", num_tokens)
        if not 1 <= num_left <= self.num_tokens:
            raise InvalidArgumentError(
                f"request {self.request_id!r} has {self.num_tokens} tokens; {num_left} of them cannot be left"
            )
        if num_left < self.num_computed_tokens:
            raise InvalidArgumentError(
                f"request {self.request_id!r} has {self.num_computed_tokens} computed tokens, whose K and V "
                f"are in its blocks; to leave {num_left}, call KVCacheManager.truncate()"
            )
        num_covered = max(0, num_left - self._hasher.num_lookahead_tokens)
        del self.block_hashes[num_covered // self._hasher.block_size :]
        del self.all_token_ids[num_left:]
        self.num_prompt_tokens = min(self.num_prompt_tokens, num_left)


def _to_list(name: str, token_ids: TokenIds) -> list[int]:
    """Return a new list of Python ints, also for a NumPy array: events cannot carry NumPy integers."""
    if isinstance(token_ids, list):
        return token_ids.copy()
    if isinstance(token_ids, str):
        refuse_type(name, token_ids, "a sequence of int")
    return list(as_list(name, token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids))


class SerializedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of a `Request`, without its hashes, which are recomputed. Fields that are None are omitted.

    So versions of kv_pool without salt regions read requests without them, and refuse the others.
    """

    request_id: RequestId
    all_token_ids: list[int] = msgspec.field(name="token_ids")
    num_prompt_tokens: int
    num_computed_tokens: int
    lora_request: LoRARequest | None = None
    mm_features: list[MultiModalFeature] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    salt_regions: list[SaltRegion] | None = None


def dump_request(request: Request) -> bytes:
    """Serialize the request: its tokens, prompt and output, and its count of computed tokens.

    About 3 bytes per token. Attributes that a subclass adds are not included.

    Raises:
        InvalidArgumentError: text with a lone surrogate, such as in the request's id.
    """
    try:
        return msgspec.msgpack.encode(msgspec.convert(request, SerializedRequest, from_attributes=True))
    except (*UNENCODABLE, *UNDECODABLE) as error:
        raise InvalidArgumentError(f"request {request.request_id!r} cannot be serialized: {error}") from error


def load_request(state: bytes, hasher: BlockHasher) -> Request:
    """Rebuild the request that `dump_request` serialized, with the hashes of this hasher.

    Raises:
        InvalidArgumentError: bytes that `dump_request` did not return, or impossible counts.
    """
    try:
        found = msgspec.msgpack.decode(state, type=SerializedRequest)
    except UNDECODABLE as error:
        raise InvalidArgumentError(f"{len(state)} bytes are not a request: {error}") from error
    num_tokens = len(found.all_token_ids)
    if not 0 < found.num_prompt_tokens <= num_tokens or not 0 <= found.num_computed_tokens <= num_tokens:
        raise InvalidArgumentError(
            f"request {found.request_id!r} has {num_tokens} tokens; it cannot have a prompt of "
            f"{found.num_prompt_tokens} and {found.num_computed_tokens} computed ones"
        )
    request = Request(
        found.request_id,
        found.all_token_ids[: found.num_prompt_tokens],
        hasher,
        lora_request=found.lora_request,
        mm_features=found.mm_features,
        cache_salt=found.cache_salt,
        session_id=found.session_id,
        salt_regions=found.salt_regions,
    )
    request.append_output_token_ids(found.all_token_ids[found.num_prompt_tokens :])
    request.num_computed_tokens = found.num_computed_tokens
    return request
