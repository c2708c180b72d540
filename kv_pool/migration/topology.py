"""`Topology`: how near nodes are, what that costs, and which target is the cheapest with room."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Annotated

import msgspec

from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.messages import NodeDescription, NodeLocation
from kv_pool.regular_files import open_regular
from kv_pool.storage.block_layout import BlockLayout

_DECAY = 0.8
"""What a measurement still counts when the next one has come."""


class Nearness(Enum):
    """The smallest place that two nodes share, nearest first."""

    DEVICE = "device"
    HOST = "host"
    RACK = "rack"
    NETWORK = "network"
    ELSEWHERE = "elsewhere"


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it costs to move bytes: `latency_s` for a start, then `bytes_per_s`."""

    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)]
    latency_s: Annotated[float, msgspec.Meta(ge=0)]

    def estimate(self, num_bytes: int) -> float:
        """Seconds for so many bytes."""
        return self.latency_s + num_bytes / self.bytes_per_s


ASSUMED_LINKS = {
    Nearness.DEVICE: Link(100e9, 1e-4),
    Nearness.HOST: Link(2.5e9, 5e-4),
    Nearness.RACK: Link(1.25e9, 1e-3),
    Nearness.NETWORK: Link(0.6e9, 2e-3),
    Nearness.ELSEWHERE: Link(0.1e9, 20e-3),
}
"""Where nothing was given and nothing is measured yet: an order of magnitude, to begin with the nearest."""


@dataclass(frozen=True)
class Target:
    """A node that could take the blocks.

    Attributes:
        seconds: estimated for all bytes.
        origin: of the link's numbers: `given`, `measured` or `assumed`.
    """

    name: str
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
class PassedOver:
    """A node that can not take the blocks, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Ranking:
    """Who could take so many blocks: the cheapest first; and who could not.

    Attributes:
        targets: ordered by seconds; of equals the one with more free blocks first, then by name.
    """

    num_blocks: int
    num_bytes: int
    targets: list[Target]
    passed_over: list[PassedOver]

    def describe(self) -> str:
        """Names and reasons, a line each."""
        lines = [f"{target.name}: {target.reason}" for target in self.targets]
        lines += [f"{other.name}: no, {other.reason}" for other in self.passed_over]
        return "\n".join(lines) or "no other node is known"


class Topology:
    """Bandwidth and latency by nearness: given, or measured as migrations end, or assumed.

        >>> from kv_pool.migration.messages import NodeLocation
        >>> from kv_pool.migration.topology import Link, Nearness, Topology, find_nearness
        >>> topology = Topology({Nearness.RACK: Link(bytes_per_s=10e9, latency_s=0.001)})
        >>> find_nearness(NodeLocation(rack="r1", host="h1"), NodeLocation(rack="r1", host="h2"))
        <Nearness.RACK: 'rack'>
        >>> topology.get_link(Nearness.RACK).estimate(1_000_000_000)
        0.101

    What was given wins: who writes it down means it. Thread-safe.

    Args:
        given: links by nearness.
    """

    def __init__(self, given: Mapping[Nearness, Link] | None = None) -> None:
        self._given = dict(given or {})
        self._lock = threading.Lock()
        # Sums that forget: bytes moved, and the seconds that this took without the latency.
        self._moved_bytes: dict[Nearness, float] = {}
        self._moving_s: dict[Nearness, float] = {}
        self._latency_s: dict[Nearness, float] = {}

    def get_link(self, nearness: Nearness) -> Link:
        """What is expected of nodes so near."""
        return self._find_link(nearness)[0]

    def note_transfer(self, nearness: Nearness, num_bytes: int, seconds: float) -> None:
        """A migration has ended: so many bytes in so many seconds. Nothing is learned from 0 of either.

        Each one counts by its size, and for 4/5 of that when the next one has come.
        """
        if num_bytes <= 0 or seconds <= 0:
            return
        with self._lock:
            latency_s = self._latency_s.get(nearness, 0.0)
            # A latency that was measured at a busy moment must not make a short transfer infinitely fast.
            moving_s = max(seconds - latency_s, seconds / 2)
            self._moved_bytes[nearness] = self._moved_bytes.get(nearness, 0.0) * _DECAY + num_bytes
            self._moving_s[nearness] = self._moving_s.get(nearness, 0.0) * _DECAY + moving_s

    def note_round_trip(self, nearness: Nearness, seconds: float) -> None:
        """A question was answered after so many seconds."""
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
    ) -> Ranking:
        """Which of the nodes have room for so many blocks, the cheapest first.

        Args:
            layout: of the blocks; nodes with another one are passed over. None: not compared.
        """
        targets = []
        passed_over = []
        for node in nodes:
            if layout is not None and node.layout != layout:
                passed_over.append(PassedOver(node.name, "its blocks have another layout"))
            elif node.num_free_blocks < num_blocks:
                passed_over.append(
                    PassedOver(
                        node.name,
                        f"{node.num_free_blocks:,} of {node.num_blocks:,} blocks are free, "
                        f"{num_blocks:,} are needed",
                    )
                )
            else:
                nearness = find_nearness(here, node.location)
                link, origin = self._find_link(nearness)
                seconds = link.estimate(num_bytes)
                targets.append(Target(node.name, nearness, seconds, link, origin, node.num_free_blocks))
        targets.sort(key=lambda target: (target.seconds, -target.num_free_blocks, target.name))
        return Ranking(num_blocks, num_bytes, targets, passed_over)

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


def find_nearness(here: NodeLocation, there: NodeLocation) -> Nearness:
    """The smallest place that both are known to be in.

    Places that differ end the search, unknown ones do not: a host's name says enough where racks have none.
    A device counts within one host only, since every host has a `cuda:0`.
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


class _TopologyFile(msgspec.Struct, forbid_unknown_fields=True):
    """One file can have all settings of a node: its links, its peers, its publisher."""

    links: dict[str, object] = {}
    peers: object = None
    publisher: object = None


def _read_link(name: str, table: object) -> Link:
    try:
        return msgspec.convert(table, Link)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"links.{name}: {error}") from error


def read_topology(path: str | PathLike[str]) -> Topology:
    """A topology with the links of a TOML file, by nearness: device, host, rack, network, elsewhere.

        [links.rack]
        bytes_per_s = 40e9
        latency_s = 0.00005

    Raises:
        InvalidArgumentError: no such file, no TOML, or no such table in it; the message names the file.
    """
    try:
        with open(open_regular(path), "rb") as file:
            found = msgspec.convert(tomllib.load(file), _TopologyFile)
        return Topology({Nearness(name): _read_link(name, link) for name, link in found.links.items()})
    except OSError as error:
        raise InvalidArgumentError(f"{path}: can not read the topology: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: this is no TOML: {error}") from error
    except msgspec.ValidationError as error:
        tables = "its tables are [[peers]], [links.NEARNESS] and [publisher]"
        raise InvalidArgumentError(f"{path}: {error}; {tables}") from error
    except ValueError as error:
        names = ", ".join(nearness.value for nearness in Nearness)
        raise InvalidArgumentError(f"{path}: {error}; links are {names}") from error
