"""`TierList`: the lower tiers of a pool, and the media in which prefixes of requests were hit."""

import msgspec


class TierStatistics(msgspec.Struct):
    """The statistics of a tier. Counts are in blocks.

    Attributes:
        medium: CPU or STORAGE.
        capacity, num_blocks: maximum and current number of blocks.
        block_bytes: size of a stored block; 0 for a tier without bytes.
        num_stored: blocks written into the tier.
        num_read: blocks read from the tier.
        num_removed: blocks that left the tier, for any reason.
        num_write_errors: blocks not stored because writing failed.
        num_read_errors: blocks lost because reading failed or they were damaged.
    """

    medium: str
    capacity: int
    num_blocks: int = 0
    block_bytes: int = 0
    num_stored: int = 0
    num_read: int = 0
    num_removed: int = 0
    num_write_errors: int = 0
    num_read_errors: int = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of the stored blocks."""
        return self.num_blocks * self.block_bytes


class TierList(msgspec.Struct, frozen=True):
    """The tiers of a pool, fastest first, and the media in which prefixes of requests were hit.

    Attributes:
        hit_blocks: hit blocks by medium; GPU is the pool itself.
        num_dropped: evicted blocks that were offloaded to no tier.
    """

    hit_blocks: dict[str, int]
    tiers: list[TierStatistics]
    num_dropped: int = 0
