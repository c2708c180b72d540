"""Types for identifiers, so that a type checker can distinguish kinds of bytes and numbers."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NewType, Protocol

BlockHash = NewType("BlockHash", bytes)
"""A digest of a block's tokens, its extra keys and everything before it; equal hashes mean equal prefixes."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A `BlockHash` followed by the KV cache group's id, 4 bytes big-endian: the key of the prefix map."""

ExternalBlockHash = int | bytes
"""A block hash as events carry it: by default the digest's last 8 bytes as an unsigned integer."""

BlockId = NewType("BlockId", int)
"""A block's index in its pool, and in the storage of that pool: 0 to `num_blocks - 1`."""

GroupId = NewType("GroupId", int)
"""A KV cache group's index in the configuration of its pool or manager."""

RequestId = NewType("RequestId", str)
"""The name that the engine gives a request of a `KVCacheManager`."""

SequenceId = NewType("SequenceId", int)
"""The number that the engine gives a sequence of a `GPUKVPool`."""

SlotId = NewType("SlotId", int)
"""A block's position in a lower tier: 0 to `capacity - 1`."""

LeaseId = NewType("LeaseId", int)
"""A lease's number, unique in its manager and never reused."""

TransferId = NewType("TransferId", bytes)
"""The 16 random bytes that identify a migration on both nodes."""

NodeName = NewType("NodeName", str)
"""The name of a node, unique among the nodes that migrate to each other."""


class TokenArray(Protocol):
    """A one-dimensional array of token ids, such as a NumPy array or a tensor."""

    def tolist(self) -> Any:
        """Return the elements as Python numbers."""


TokenIds = Sequence[int] | TokenArray
"""Token ids, prompt or generated."""


class BlockMove(NamedTuple):
    """A copy of the bytes of block `source` over those of block `target`. The source does not change.

    A plan is a list of moves with distinct targets, applied simultaneously: each target gets the bytes that
    its source held before the plan. A block may be the source of several moves. If a block is the target of
    one move and the source of another, `BlockStorage.apply_moves` orders the copies.
    """

    source: BlockId
    target: BlockId


def is_run(block_ids: Sequence[BlockId]) -> bool:
    """Return whether the ids are consecutive and ascending: True for one id, False for none."""
    return len(block_ids) > 0 and list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids)))
