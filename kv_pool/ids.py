"""Types for identifiers, so that a checker tells one kind of bytes or number from another."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NewType, Protocol

BlockHash = NewType("BlockHash", bytes)
"""Digest of a block's tokens, its extra keys and everything before it: equal hashes, equal prefixes."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A `BlockHash` followed by the KV cache group's id, 4 bytes big-endian: the key of the prefix map."""

ExternalBlockHash = int | bytes
"""A block hash as events carry it: by default the digest's last 8 bytes as an unsigned integer."""


class TokenArray(Protocol):
    """An array of token ids in one dimension, such as NumPy's, or a tensor."""

    def tolist(self) -> Any:
        """Return the elements as Python numbers."""


TokenIds = Sequence[int] | TokenArray
"""Token ids of a prompt, or generated ones."""


class BlockMove(NamedTuple):
    """Copy the bytes of block `source` over those of block `target`; the source keeps its own.

    A plan is a list of moves with distinct targets, which are made at once: each target gets what its source
    held before. One block may be the source of several. Where a block is the target of one move and the
    source of another, the order of copies matters; `BlockStorage.apply_moves` sees to it.
    """

    source: int
    target: int
