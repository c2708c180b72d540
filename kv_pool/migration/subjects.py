"""What is migrated: blocks by their ids, a sequence, or a prefix by its hashes."""

import msgspec


class BlocksSubject(msgspec.Struct, frozen=True, tag="blocks", forbid_unknown_fields=True):
    """Blocks by id, in use or cached.

    Attributes:
        block_ids: distinct.
        generations: of each block when it was named (`KVCacheBlock.generation`); () to take them as they are
            now. A block that was taken anew since then is refused.
    """

    block_ids: tuple[int, ...]
    generations: tuple[int, ...] = ()


class SequenceSubject(msgspec.Struct, frozen=True, tag="sequence", forbid_unknown_fields=True):
    """All blocks of a sequence, or of a request, in the order of its tokens, the last one included."""

    sequence_id: int | str


class PrefixSubject(msgspec.Struct, frozen=True, tag="prefix", forbid_unknown_fields=True):
    """The longest cached prefix of these hashes, in use or free. Copied, never moved.

    Attributes:
        block_hashes: at the pool's `hash_block_size`, head first.
    """

    block_hashes: tuple[bytes, ...]


Subject = BlocksSubject | SequenceSubject | PrefixSubject


def describe_subject(subject: Subject) -> str:
    """In words, for messages and lists."""
    match subject:
        case BlocksSubject():
            return f"{len(subject.block_ids)} blocks"
        case SequenceSubject():
            return f"sequence {subject.sequence_id}"
        case _:
            return f"a prefix of {len(subject.block_hashes)} blocks"
