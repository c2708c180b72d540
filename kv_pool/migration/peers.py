"""`Peers`: the names and addresses of other nodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from os import PathLike

import msgspec

from kv_pool.errors import InvalidArgumentError, PeerUnavailableError
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import parse_address
from kv_pool.migration.messages import KnownNode, NodeLocation
from kv_pool.regular_files import read_toml

_SHOWN_NAMES = 10


class Peers:
    """Names and addresses of nodes: configured ones and those learned from a registry.

        >>> from kv_pool.migration.peers import Peers
        >>> peers = Peers()
        >>> peers.add("b", "127.0.0.1:7402")
        >>> peers.get_address("b"), [node.name for node in peers.list_nodes()]
        ('127.0.0.1:7402', ['b'])

    A configured node takes precedence over a learned one of the same name. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[NodeName, KnownNode] = {}
        self._learned: dict[NodeName, KnownNode] = {}

    def add(self, name: NodeName, address: str, location: NodeLocation = NodeLocation()) -> None:  # noqa: B008 (frozen)
        """Add a node, replacing a node of the same name.

        Raises:
            InvalidArgumentError: the name or the address is invalid. Nothing has changed.
        """
        node = KnownNode(check_name(name), _check_address(address), location)
        with self._lock:
            self._given[name] = node

    def remove(self, name: NodeName) -> bool:
        """Remove a configured or learned node. Return False if the name is unknown."""
        with self._lock:
            given = self._given.pop(name, None)
            learned = self._learned.pop(name, None)
            return given is not None or learned is not None

    def learn(self, nodes: Sequence[KnownNode]) -> None:
        """Replace all learned nodes by `nodes`, the list of a registry.

        Nodes with an invalid name or address are skipped.
        """
        learned = {}
        for node in nodes:
            try:
                learned[check_name(node.name)] = msgspec.structs.replace(
                    node, address=_check_address(node.address)
                )
            except InvalidArgumentError:
                continue
        with self._lock:
            self._learned = learned

    def get_address(self, name: NodeName) -> str:
        """Return the address of a node, `host:port`.

        Raises:
            PeerUnavailableError: the name is unknown; the message lists the known names.
        """
        return self.get_node(name).address

    def get_node(self, name: NodeName) -> KnownNode:
        """Return a node's name, address and location. Raises the errors of `get_address`."""
        with self._lock:
            node = self._given.get(name) or self._learned.get(name)
            known = sorted({*self._given, *self._learned})
        if node is None:
            shown = ", ".join(known[:_SHOWN_NAMES])
            more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
            raise PeerUnavailableError(f"node {name!r} is unknown; known nodes: {shown or 'none'}{more}")
        return node

    def list_nodes(self) -> list[KnownNode]:
        """Return all nodes, sorted by name."""
        with self._lock:
            nodes = {**self._learned, **self._given}
        return [nodes[name] for name in sorted(nodes)]

    def __len__(self) -> int:
        with self._lock:
            return len({*self._given, *self._learned})


class _Peer(NodeLocation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: NodeName
    address: str


class _PeersFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file with all settings of a node: links, peers and publisher."""

    peers: list[_Peer] = []
    links: object = None
    publisher: object = None


def read_peers(path: str | PathLike[str]) -> Peers:
    """Return the peers of a TOML file.

        [[peers]]
        name = "gpu-node-2"
        address = "10.0.0.2:7400"
        rack = "r1"                  # network, rack, host and device are optional

    Raises:
        InvalidArgumentError: the file cannot be read, is not TOML, or has unknown tables or invalid values.
            The message names the file.
    """
    tables = read_toml(path, "the peers")
    try:
        found = msgspec.convert(tables, _PeersFile)
    except msgspec.ValidationError as error:
        allowed = "allowed tables are [[peers]], [links.NEARNESS] and [publisher]"
        raise InvalidArgumentError(f"{path}: {error}; {allowed}") from error
    peers = Peers()
    names = set()
    for peer in found.peers:
        if peer.name in names:
            raise InvalidArgumentError(f"{path}: two peers are named {peer.name!r}")
        names.add(peer.name)
        try:
            peers.add(peer.name, peer.address, NodeLocation(peer.network, peer.rack, peer.host, peer.device))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{path}: peer {peer.name!r}: {error}") from error
    return peers


def parse_peer(text: str) -> KnownNode:
    """Parse `name=host:port`. Raises InvalidArgumentError for other text."""
    name, separator, address = text.partition("=")
    if not separator:
        raise InvalidArgumentError(f"{text!r} is not a peer; write name=host:port")
    return KnownNode(check_name(name.strip()), _check_address(address.strip()))


def check_name(name: str) -> NodeName:
    """Return `name` if it is a valid node name. Names are used in file names and on command lines.

    Raises:
        InvalidArgumentError: it is empty, longer than 64 characters, has characters other than ASCII letters,
            digits and `._-`, or does not start with a letter or digit.
    """
    is_plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not (is_plain and len(name) <= 64 and name[0].isalnum()):
        raise InvalidArgumentError(
            f"{name!r} is not a valid node name; use 1 to 64 letters, digits, '.', '_' or '-', the first one "
            "a letter or digit"
        )
    return NodeName(name)


def _check_address(address: str) -> str:
    _, port = parse_address(address)
    if not port:
        raise InvalidArgumentError(f"{address!r} has port 0; a peer's address needs its actual port")
    return address
