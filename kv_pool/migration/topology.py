"""`Topology`: nearness of nodes, cost of transfers between them, ranking of targets; the file of nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Annotated

import msgspec

from kv_pool.errors import InvalidArgumentError, KVPoolError, LayoutMismatchError, PoolExhaustedError
from kv_pool.ids import NodeName
from kv_pool.migration.messages import NodeDescription, NodeLocation
from kv_pool.migration.peers import Peers
from kv_pool.regular_files import read_toml
from kv_pool.storage.block_layout import BlockLayout

_DECAY = 0.8
"""The weight of earlier measurements relative to the newest one."""


class Nearness(Enum):
    """The smallest common place of two nodes, nearest first."""

    DEVICE = "device"
    HOST = "host"
    RACK = "rack"
    NETWORK = "network"
    ELSEWHERE = "elsewhere"


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a transfer: a start-up time `latency_s`, then `bytes_per_s`."""

    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    latency_s: Annotated[float, msgspec.Meta(ge=0)]

    def estimate(self, num_bytes: int) -> float:
        """Return the estimated seconds for `num_bytes`."""
        return self.latency_s + num_bytes / self.bytes_per_s


ASSUMED_LINKS = {
    Nearness.DEVICE: Link(100e9, 1e-4),
    Nearness.HOST: Link(2.5e9, 5e-4),
    Nearness.RACK: Link(1.25e9, 1e-3),
    Nearness.NETWORK: Link(0.6e9, 2e-3),
    Nearness.ELSEWHERE: Link(0.1e9, 20e-3),
}
"""The defaults until a link is configured or measured: orders of magnitude that prefer near nodes."""


@dataclass(frozen=True)
class Target:
    """A node that can receive the blocks.

    Attributes:
        seconds: estimated for all bytes.
        origin: of the link's numbers: `given`, `measured` or `assumed`.
    """

    name: NodeName
    nearness: Nearness
    seconds: float
    link: Link
    origin: str
    num_free_blocks: int

    @property
    def reason(self) -> str:
        place = "elsewhere" if self.nearness is Nearness.ELSEWHERE else f"same {self.nearness.value}"
        return (
            f"{place}, {self.link.bytes_per_s / 1e9:.3g} GB/s and {self.link.latency_s * 1000:.3g} ms "
            f"({self.origin}), {self.num_free_blocks:,} blocks free: {self.seconds * 1000:.3g} ms"
        )


@dataclass(frozen=True)
class ExcludedNode:
    """A node that cannot receive the blocks, and the error of a migration to it."""

    name: NodeName
    error: KVPoolError

    @property
    def reason(self) -> str:
        return str(self.error)


@dataclass(frozen=True)
class Ranking:
    """The nodes that can receive a number of blocks, cheapest first, and the nodes that cannot.

    Attributes:
        targets: ordered by seconds, then by free blocks (most first), then by name.
    """

    num_blocks: int
    num_bytes: int
    targets: list[Target]
    excluded: list[ExcludedNode]

    def describe(self) -> str:
        """Return one line with name and reason for each node."""
        lines = [f"{target.name}: {target.reason}" for target in self.targets]
        lines += [f"{other.name}: no, {other.reason}" for other in self.excluded]
        return "\n".join(lines) or "no other node is known"


class Topology:
    """Bandwidth and latency by nearness: given, measured from finished migrations, or assumed.

        >>> from kv_pool.migration.messages import NodeLocation
        >>> from kv_pool.migration.topology import Link, Nearness, Topology, find_nearness
        >>> topology = Topology({Nearness.RACK: Link(bytes_per_s=10e9, latency_s=0.001)})
        >>> find_nearness(NodeLocation(rack="r1", host="h1"), NodeLocation(rack="r1", host="h2"))
        <Nearness.RACK: 'rack'>
        >>> topology.get_link(Nearness.RACK).estimate(1_000_000_000)
        0.101

    Given links take precedence over measured ones. Thread-safe.

    Args:
        given: configured links by nearness.
    """

    def __init__(self, given: Mapping[Nearness, Link] | None = None) -> None:
        self._given = dict(given or {})
        self._lock = threading.Lock()
        # Exponentially decaying sums: bytes moved, and the seconds for them without the latency.
        self._moved_bytes: dict[Nearness, float] = {}
        self._moving_s: dict[Nearness, float] = {}
        self._latency_s: dict[Nearness, float] = {}

    def get_link(self, nearness: Nearness) -> Link:
        """Return the expected link between nodes of this nearness."""
        return self._find_link(nearness)[0]

    def note_transfer(self, nearness: Nearness, num_bytes: int, seconds: float) -> None:
        """Record a finished migration of `num_bytes` in `seconds`. No-op if either is 0.

        A migration is weighted by its size; its weight drops by 1/5 with each further one.
        """
        if num_bytes <= 0 or seconds <= 0:
            return
        with self._lock:
            latency_s = self._latency_s.get(nearness, 0.0)
            # A latency measured under load must not make a short transfer infinitely fast.
            moving_s = max(seconds - latency_s, seconds / 2)
            self._moved_bytes[nearness] = self._moved_bytes.get(nearness, 0.0) * _DECAY + num_bytes
            self._moving_s[nearness] = self._moving_s.get(nearness, 0.0) * _DECAY + moving_s

    def note_round_trip(self, nearness: Nearness, seconds: float) -> None:
        """Record the round-trip time of a call. No-op if it is 0."""
        if seconds <= 0:
            return
        with self._lock:
            known = self._latency_s.get(nearness, seconds)
            self._latency_s[nearness] = known * _DECAY + seconds * (1 - _DECAY)

    def rank(
        self,
        here: NodeLocation,
        num_bytes: int,
        num_blocks: int,
        nodes: Sequence[NodeDescription],
        *,
        layout: BlockLayout | None = None,
        sequence_kind: str = "",
    ) -> Ranking:
        """Rank the nodes that can receive `num_blocks` blocks, cheapest first.

        Args:
            here: location of the source.
            num_bytes: of all blocks.
            layout: of the blocks; nodes with another layout are passed over. None skips the comparison.
            sequence_kind: `Sequences.kind` of the sequence; nodes with another kind are passed over. ""
                skips the comparison.
        """
        targets = []
        excluded = []
        for node in nodes:
            error = _find_refusal(node, num_blocks, layout, sequence_kind)
            if error is not None:
                excluded.append(ExcludedNode(node.name, error))
                continue
            nearness = find_nearness(here, node.location)
            link, origin = self._find_link(nearness)
            seconds = link.estimate(num_bytes)
            targets.append(Target(node.name, nearness, seconds, link, origin, node.num_free_blocks))
        targets.sort(key=lambda target: (target.seconds, -target.num_free_blocks, target.name))
        return Ranking(num_blocks, num_bytes, targets, excluded)

    def _find_link(self, nearness: Nearness) -> tuple[Link, str]:
        given = self._given.get(nearness)
        if given is not None:
            return given, "given"
        assumed = ASSUMED_LINKS[nearness]
        with self._lock:
            latency_s = self._latency_s.get(nearness, assumed.latency_s)
            if nearness not in self._moved_bytes:
                return Link(assumed.bytes_per_s, latency_s), "assumed"
            return Link(self._moved_bytes[nearness] / self._moving_s[nearness], latency_s), "measured"


def _find_refusal(
    node: NodeDescription, num_blocks: int, layout: BlockLayout | None, sequence_kind: str
) -> KVPoolError | None:
    """Return why a node cannot receive these blocks; None if it can. Arguments as for `Topology.rank`."""
    if layout is not None and node.layout != layout:
        return LayoutMismatchError(
            f"its blocks have another layout: {layout.describe_differences(node.layout)}"
        )
    if sequence_kind and node.sequence_kind not in ("", sequence_kind):
        return InvalidArgumentError(f"it takes {node.sequence_kind}, and these are {sequence_kind}")
    if node.num_free_blocks < num_blocks:
        num_free = f"{node.num_free_blocks:,} of {node.num_blocks:,} blocks are free"
        return PoolExhaustedError(f"{num_free}, {num_blocks:,} are needed")
    return None


def find_nearness(here: NodeLocation, there: NodeLocation) -> Nearness:
    """Return the smallest place that both locations are known to share.

    The search ends at the first place that differs and skips unknown places: equal host names are sufficient
    if the racks are unknown. Devices are compared within one host only, since every host has a `cuda:0`.
    """
    nearest = Nearness.ELSEWHERE
    for nearness in (Nearness.NETWORK, Nearness.RACK, Nearness.HOST, Nearness.DEVICE):
        mine, theirs = getattr(here, nearness.value), getattr(there, nearness.value)
        if not mine or not theirs:
            continue
        if mine != theirs or (nearness is Nearness.DEVICE and nearest is not Nearness.HOST):
            break
        nearest = nearness
    return nearest


class _Links(msgspec.Struct, forbid_unknown_fields=True):
    device: Link | None = None
    host: Link | None = None
    rack: Link | None = None
    network: Link | None = None
    elsewhere: Link | None = None


class _Peer(NodeLocation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: NodeName
    address: str


class _NodesFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file with all settings of a node: links, peers and publisher."""

    links: _Links = msgspec.field(default_factory=_Links)
    peers: list[_Peer] = []
    publisher: object = None


def _read_nodes(path: str | PathLike[str]) -> _NodesFile:
    tables = read_toml(path, "the nodes")
    try:
        return msgspec.convert(tables, _NodesFile)
    except msgspec.ValidationError as error:
        raise InvalidArgumentError(
            f"{path}: {error}; allowed tables are [[peers]], [publisher] and [links.NEARNESS], with NEARNESS "
            f"one of {', '.join(nearness.value for nearness in Nearness)}"
        ) from error


def read_topology(path: str | PathLike[str]) -> Topology:
    """Return a topology with the links of a TOML file, by nearness: device, host, rack, network, elsewhere.

        [links.rack]
        bytes_per_s = 40e9
        latency_s = 0.00005

    Raises:
        InvalidArgumentError: the file cannot be read, is not TOML, or has unknown tables or invalid values.
            The message names the file.
    """
    links = msgspec.structs.asdict(_read_nodes(path).links)
    return Topology({Nearness(name): link for name, link in links.items() if link is not None})


def read_peers(path: str | PathLike[str], clock: Callable[[], float] = time.monotonic) -> Peers:
    """Return the peers of the same file.

        [[peers]]
        name = "gpu-node-2"
        address = "10.0.0.2:7400"
        rack = "r1"                  # network, rack, host and device are optional

    Raises:
        InvalidArgumentError: as `read_topology`; also if a name or an address is invalid, or a name is used
            twice.
    """
    peers = Peers(clock)
    for peer in _read_nodes(path).peers:
        if peer.name in peers:
            raise InvalidArgumentError(f"{path}: two peers are named {peer.name!r}")
        try:
            peers.add(peer.name, peer.address, NodeLocation(peer.network, peer.rack, peer.host, peer.device))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{path}: peer {peer.name!r}: {error}") from error
    return peers
