"""What a node says of its peers, migrations and tiers over the control socket."""

import msgspec

from kv_pool.migration.status import MigrationStatus
from kv_pool.tiers.tier import TierStatistics


class PeerReport(msgspec.Struct, frozen=True):
    """Another node, as it has just answered.

    Attributes:
        nearness: the smallest place that it shares with this one.
        round_trip_ms: from the question to its answer; 0 where there was none.
        error: why it could not be asked; "" if it could.
    """

    name: str
    address: str
    nearness: str = ""
    num_free_blocks: int = 0
    num_blocks: int = 0
    round_trip_ms: float = 0.0
    error: str = ""


class PeerList(msgspec.Struct, frozen=True):
    """A node and the nodes that it knows."""

    name: str
    address: str
    peers: list[PeerReport]


class MigrationList(msgspec.Struct, frozen=True):
    """Migrations of a node that run, and the last that have ended, oldest first."""

    name: str
    migrations: list[MigrationStatus]


class TierList(msgspec.Struct, frozen=True):
    """The tiers of a pool, warmest first, and where the prefixes of requests were found.

    Attributes:
        hit_blocks: by medium, GPU for the pool itself.
        num_dropped: blocks that no tier got, when the pool took them anew.
    """

    hit_blocks: dict[str, int]
    tiers: list[TierStatistics]
    num_dropped: int = 0
