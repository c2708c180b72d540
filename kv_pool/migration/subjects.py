"""Subjects of migrations: blocks by id, a sequence, or a prefix by its hashes."""

import msgspec

from kv_pool.ids import BlockId, RequestId, SequenceId


class BlocksSubject(msgspec.Struct, frozen=True, tag="blocks", forbid_unknown_fields=True):
    """Blocks by id, in use or cached.

    Attributes:
        block_ids: distinct.
        generations: `KVCacheBlock.generation` of each block when it was named; a block that was reused since
            then is refused. () to accept all blocks as they are.
    """

    block_ids: tuple[BlockId, ...]
    generations: tuple[int, ...] = ()


class SequenceSubject(msgspec.Struct, frozen=True, tag="sequence", forbid_unknown_fields=True):
    """All blocks of a sequence or request, in token order, including a partial last block."""

    sequence_id: SequenceId | RequestId


class PrefixSubject(msgspec.Struct, frozen=True, tag="prefix", forbid_unknown_fields=True):
    """The longest cached prefix of these hashes, in use or free. Copied, never moved.

    Attributes:
        block_hashes: of `hash_block_size` tokens each, first block first.
    """

    block_hashes: tuple[bytes, ...]


Subject = BlocksSubject | SequenceSubject | PrefixSubject


def describe_subject(subject: Subject) -> str:
    """Describe a subject in words, for messages and lists."""
    match subject:
        case BlocksSubject():
            return f"{len(subject.block_ids)} blocks"
        case SequenceSubject():
            return f"sequence {subject.sequence_id}"
        case _:
            return f"a prefix of {len(subject.block_hashes)} blocks"
