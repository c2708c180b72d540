"""`dump_request` and `load_request`: a `Request` as bytes, so that another process can continue it."""

import msgspec

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.ids import RequestId
from kv_pool.manager.requests.request import LoRARequest, MultiModalFeature, Request, SaltRegion


class SerializedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The fields of a `Request`, without its hashes, which are recomputed. Fields that are None are omitted.

    So versions of kv_pool without salt regions read requests without them, and refuse the others.
    """

    request_id: RequestId
    token_ids: list[int]
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
    features = request.mm_features
    state = SerializedRequest(
        request.request_id,
        request.all_token_ids,
        request.num_prompt_tokens,
        request.num_computed_tokens,
        request.lora_request,
        None if features is None else list(features),
        request.cache_salt,
        request.session_id,
        None if request.salt_regions is None else list(request.salt_regions),
    )
    try:
        return msgspec.msgpack.encode(state)
    except UNENCODABLE as error:
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
    num_tokens = len(found.token_ids)
    if not 0 < found.num_prompt_tokens <= num_tokens or not 0 <= found.num_computed_tokens <= num_tokens:
        raise InvalidArgumentError(
            f"request {found.request_id!r} has {num_tokens} tokens; it cannot have a prompt of "
            f"{found.num_prompt_tokens} and {found.num_computed_tokens} computed ones"
        )
    request = Request(
        found.request_id,
        found.token_ids[: found.num_prompt_tokens],
        hasher,
        lora_request=found.lora_request,
        mm_features=found.mm_features,
        cache_salt=found.cache_salt,
        session_id=found.session_id,
        salt_regions=found.salt_regions,
    )
    request.append_output_token_ids(found.token_ids[found.num_prompt_tokens :])
    request.num_computed_tokens = found.num_computed_tokens
    return request
