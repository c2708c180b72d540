"""`SequenceList`: the sequences or requests that use the blocks of a pool."""

import msgspec

from kv_pool.ids import RequestId, SequenceId


class SequenceReport(msgspec.Struct, frozen=True):
    """A sequence of a `GPUKVPool`, or a request of a `KVCacheManager`. Unknown values are None.

    Attributes:
        num_blocks: number of blocks in all its block tables, null blocks not counted.
        priority: priority of a sequence, 0 to 2.
        idle_s: seconds since its last access.
        is_in_transit: a migration or a swap is in progress; a request has no tables meanwhile.
        num_tokens: number of tokens whose keys and values are in the blocks.
        num_immovable_blocks: blocks that compaction may not move: pinned, or held by a transfer or a plan.
    """

    sequence_id: SequenceId | RequestId
    num_blocks: int
    priority: int | None
    idle_s: float | None
    is_in_transit: bool
    num_tokens: int | None = None
    num_immovable_blocks: int = 0


class SequenceList(msgspec.Struct, frozen=True):
    """The sequences of a pool, by last access, oldest first; or its requests, in order of admission."""

    sequences: list[SequenceReport]
