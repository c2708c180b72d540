"""A `Request` as bytes, so that another process goes on with it."""

import msgspec

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError
from kv_pool.foreign_bytes import UNDECODABLE, UNENCODABLE
from kv_pool.manager.requests.request import LoRARequest, MultiModalFeature, Request


class RequestState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a `Request` consists of; see there. Its hashes are not among it: they are computed anew."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    lora_request: LoRARequest | None = None
    mm_features: list[MultiModalFeature] | None = None
    cache_salt: str | None = None
    session_id: str | None = None


def dump_request(request: Request) -> bytes:
    """The request with its tokens, prompt and output, and how many of them are computed.

    About 3 bytes a token. What a subclass has added is not among it.

    Raises:
        InvalidArgumentError: text with a lone surrogate, such as in the request's id.
    """
    features = request.mm_features
    state = RequestState(
        request.request_id,
        request.all_token_ids,
        request.num_prompt_tokens,
        request.num_computed_tokens,
        request.lora_request,
        None if features is None else list(features),
        request.cache_salt,
        request.session_id,
    )
    try:
        return msgspec.msgpack.encode(state)
    except UNENCODABLE as error:
        raise InvalidArgumentError(f"request {request.request_id!r} has no form in bytes: {error}") from error


def load_request(state: bytes, hasher: BlockHasher) -> Request:
    """The request that `dump_request` was given, with the hashes of this hasher.

    Raises:
        InvalidArgumentError: bytes that are not from there, or counts that cannot be.
    """
    try:
        found = msgspec.msgpack.decode(state, type=RequestState)
    except UNDECODABLE as error:
        raise InvalidArgumentError(f"{len(state)} bytes are no request: {error}") from error
    num_tokens = len(found.token_ids)
    if not 0 < found.num_prompt_tokens <= num_tokens or not 0 <= found.num_computed_tokens <= num_tokens:
        raise InvalidArgumentError(
            f"request {found.request_id!r} has {num_tokens} tokens; {found.num_prompt_tokens} of the prompt "
            f"and {found.num_computed_tokens} computed ones cannot be"
        )
    request = Request(
        found.request_id,
        found.token_ids[: found.num_prompt_tokens],
        hasher,
        lora_request=found.lora_request,
        mm_features=found.mm_features,
        cache_salt=found.cache_salt,
        session_id=found.session_id,
    )
    request.append_output_token_ids(found.token_ids[found.num_prompt_tokens :])
    request.num_computed_tokens = found.num_computed_tokens
    return request
