"""Types for identifiers, so that a checker tells one kind of bytes or number from another."""

from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""Digest of a block's tokens, its extra keys and everything before it: equal hashes, equal prefixes."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A `BlockHash` followed by the KV cache group's id, 4 bytes big-endian: the key of the prefix map."""

ExternalBlockHash = int | bytes
"""A block hash as events carry it: by default the digest's last 8 bytes as an unsigned integer."""
