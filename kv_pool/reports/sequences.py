"""`SequenceList`: the sequences, or requests, that hold the blocks of a pool."""

import msgspec


class SequenceReport(msgspec.Struct, frozen=True):
    """A sequence of a `GPUKVPool`, or a request of a `KVCacheManager`. None where the pool does not know.

    Attributes:
        num_blocks: in all its block tables, null blocks not counted.
        priority: of a sequence, 0 to 2.
        idle_s: seconds since its last access.
        is_migrating: a migration, or a swap, has it at the moment; a request has no tables meanwhile.
        num_tokens: tokens whose keys and values are in the blocks.
        num_fixed_blocks: blocks that compaction may not move: pinned, or held by a transfer or an open plan.
    """

    sequence_id: int | str
    num_blocks: int
    priority: int | None
    idle_s: float | None
    is_migrating: bool
    num_tokens: int | None = None
    num_fixed_blocks: int = 0


class SequenceList(msgspec.Struct, frozen=True):
    """The sequences of a pool: by last access, the latest last; requests in the order of their admission."""

    sequences: list[SequenceReport]
