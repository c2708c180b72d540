"""`ReplayRequest`: a request of a trace, with the interface that the manager needs."""

from itertools import repeat
from struct import Struct
from typing import Annotated, Any, ClassVar, Self

import msgspec

from kv_pool.core.block_hash import BlockHasher
from kv_pool.errors import InvalidArgumentError, describe_known
from kv_pool.ids import BlockHash, RequestId
from kv_pool.lab.trace import TraceRequest

CONVENTIONS = ("full_blocks_cap", "full_blocks", "ids_as_blocks_cap", "ids_as_blocks")
"""The conventions for which blocks can be cached, and how much of a prompt can be a hit.

    full_blocks        full blocks only, as in an engine
    ids_as_blocks      every hash id is a block, as in papers: prompts are padded to whole ids
    ..._cap            at least the last token is computed, as in an engine
"""

# Events carry the last 8 bytes of a hash, big-endian, so these 8 bytes must be unique by themselves.
_pack = Struct(">IQ").pack
_pack_output = Struct(">QQ").pack
_OUTPUT = 1 << 63
_MASK = (1 << 64) - 1


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ReplayRequest(msgspec.Struct, array_like=True, eq=False):
    """A request of a trace, with the hashes of its blocks. It can be sent to another process as it is.

    Attributes:
        number: the number of its line, which is its id.
        num_prompt_tokens: tokens of the prompt, those included that a convention adds.
        num_tokens: prompt and generated tokens so far.
        num_output_left: tokens to generate.
        tokens_per_id, prompt_ids: the ids of the prompt, and the tokens that each stands for.
        max_hit_tokens: maximum number of tokens of a hit.
        num_cacheable_blocks: full blocks of the prompt, the denominator of the block hit rate.
        step_ends: numbers of tokens at which steps of the prompt end, so that states can be kept there.
    """

    # The manager reads these attributes; a trace has none of them.
    lora_request: ClassVar[Any] = None
    mm_features: ClassVar[Any] = None
    cache_salt: ClassVar[Any] = None

    number: _Count
    session_id: str | None
    arrival_ms: float
    input_length: _Count
    num_prompt_tokens: _Count
    num_tokens: _Positive
    num_output_left: _Count
    block_size: _Positive
    tokens_per_id: _Positive
    prompt_ids: list[int]
    block_hashes: list[BlockHash]
    max_hit_tokens: int
    num_cacheable_blocks: int
    tenant: str | None = None
    num_computed_tokens: int = 0
    step_ends: list[int] = []
    request_id: RequestId = RequestId("")

    def __post_init__(self) -> None:
        self.request_id = RequestId(str(self.number))

    def __repr__(self) -> str:
        return (
            f"<ReplayRequest {self.request_id!r}: {self.num_tokens} tokens, {self.num_prompt_tokens} of the "
            f"prompt, {self.num_computed_tokens} computed, {self.num_output_left} to generate>"
        )

    @classmethod
    def from_trace(
        cls,
        traced: TraceRequest,
        block_size: int,
        convention: str = "full_blocks_cap",
        trace_block_size: int | None = None,
        hasher: BlockHasher | None = None,
    ) -> Self:
        """Create the request of a trace.

        Args:
            trace_block_size: tokens per hash id, for a request of hash ids.
            hasher: for a request of token ids.
        Raises:
            InvalidArgumentError: the convention is unknown, or one of the arguments above is missing.
        """
        if convention not in CONVENTIONS:
            raise InvalidArgumentError(
                f"unknown convention {convention!r}; {describe_known(convention, CONVENTIONS)}"
            )
        num_tokens = traced.input_length
        if traced.hash_ids is not None:
            if trace_block_size is None:
                raise InvalidArgumentError("a request of hash ids needs the trace's block size")
            if convention.startswith("ids_as_blocks"):
                num_tokens = len(traced.hash_ids) * trace_block_size
            prompt_ids, tokens_per_id = traced.hash_ids, trace_block_size
            hashes = hash_ids_to_block_hashes(prompt_ids, trace_block_size, num_tokens, block_size)
        else:
            if hasher is None or traced.token_ids is None:
                raise InvalidArgumentError("a request of token ids needs a BlockHasher")
            prompt_ids, tokens_per_id = traced.token_ids, 1
            hashes = hasher.hash_blocks(prompt_ids)
        request = cls(
            number=traced.line,
            session_id=traced.session_id,
            arrival_ms=traced.arrival_ms,
            input_length=traced.input_length,
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
            num_output_left=traced.output_length,
            block_size=block_size,
            tokens_per_id=tokens_per_id,
            prompt_ids=prompt_ids,
            block_hashes=hashes,
            max_hit_tokens=traced.input_length - 1 if convention.endswith("_cap") else num_tokens,
            num_cacheable_blocks=0,
            tenant=traced.tenant,
        )
        request._name_unknown_blocks()
        request.num_cacheable_blocks = len(hashes)
        return request

    @property
    def all_token_ids(self) -> list[int]:
        """Token ids that represent the request.

        For a trace of hash ids, each token has the hash id of its block. Generated tokens are 0, because
        traces do not contain them.
        """
        ids, times = self.prompt_ids, self.tokens_per_id
        tokens = [token for token in ids for _ in range(times)][: self.num_prompt_tokens]
        return tokens + [0] * (self.num_tokens - len(tokens))

    def append_output(self, num_tokens: int) -> None:
        """Add `num_tokens` generated tokens."""
        self.num_tokens += num_tokens
        self.num_output_left -= num_tokens
        self._name_unknown_blocks()

    def _name_unknown_blocks(self) -> None:
        """Give unique hashes to full blocks of unknown content, so that they are cached but never hit.

        Such blocks hold generated tokens, or the end of a prompt that no hash id covers.
        """
        for index in range(len(self.block_hashes), self.num_tokens // self.block_size):
            self.block_hashes.append(self.name_block(index))

    def name_block(self, index: int) -> BlockHash:
        """Return the hash of a block of this request, or the hash it will have when it is full."""
        if index < len(self.block_hashes):
            return self.block_hashes[index]
        last = (_OUTPUT | self.number << 24) ^ index
        return BlockHash(_pack_output(self.number, last & _MASK))


def hash_ids_to_block_hashes(
    hash_ids: list[int], trace_block_size: int, num_tokens: int, block_size: int
) -> list[BlockHash]:
    """Return the hashes of a prompt's full blocks of `block_size` tokens, computed from its hash ids.

    A hash id identifies the prefix that ends with its block. A prefix that ends at any token is therefore
    identified by the hash id of the block it ends in and the number of tokens it covers in that block. This
    works for any two block sizes; equal prefixes have equal hashes:

        trace blocks   |---- id 7 ----|---- id 9 ----|    trace_block_size 8
        pool blocks    |-- 7,6 --|-- 9,4 --| rest         block_size 6
    """
    num_covered = min(num_tokens, len(hash_ids) * trace_block_size)
    num_blocks = num_covered // block_size
    if block_size == trace_block_size:
        ids = hash_ids if num_blocks == len(hash_ids) else hash_ids[:num_blocks]
        return [BlockHash(packed) for packed in map(_pack, repeat(block_size), ids)]
    hashes: list[BlockHash] = []
    for end in range(block_size, num_blocks * block_size + 1, block_size):
        index = (end - 1) // trace_block_size
        num_reached = end - index * trace_block_size
        hashes.append(BlockHash(_pack(num_reached, hash_ids[index] ^ (num_reached << 44 & _MASK))))
    return hashes
