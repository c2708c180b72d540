"""Reports over the control socket: a node's peers and migrations, a pool's tiers."""

import msgspec

from kv_pool.ids import NodeName
from kv_pool.migration.status import MigrationStatus
from kv_pool.tiers.tier import TierStatistics


class PeerReport(msgspec.Struct, frozen=True):
    """Another node and its latest answer.

    Attributes:
        nearness: the smallest location that both nodes share.
        round_trip_ms: from request to answer; 0 without an answer.
        error: why there is no answer; "" if there is one.
    """

    name: NodeName
    address: str
    nearness: str = ""
    num_free_blocks: int = 0
    num_blocks: int = 0
    round_trip_ms: float = 0.0
    error: str = ""


class PeerList(msgspec.Struct, frozen=True):
    """A node and the nodes that it knows."""

    name: NodeName
    address: str
    peers: list[PeerReport]


class MigrationList(msgspec.Struct, frozen=True):
    """The running migrations of a node and the last ones that ended, oldest first."""

    name: NodeName
    migrations: list[MigrationStatus]


class TierList(msgspec.Struct, frozen=True):
    """The tiers of a pool, fastest first, and the media in which prefixes of requests were hit.

    Attributes:
        hit_blocks: hit blocks by medium; GPU is the pool itself.
        num_dropped: evicted blocks that were offloaded to no tier.
    """

    hit_blocks: dict[str, int]
    tiers: list[TierStatistics]
    num_dropped: int = 0
