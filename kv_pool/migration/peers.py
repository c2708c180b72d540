"""`Peers`: the nodes that a node knows by name, and where they listen."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Sequence
from os import PathLike

import msgspec

from kv_pool.errors import InvalidArgumentError, PeerUnavailableError
from kv_pool.migration.addresses import parse_address
from kv_pool.migration.messages import KnownNode, NodeLocation
from kv_pool.regular_files import open_regular

_SHOWN_NAMES = 10


class Peers:
    """Names of nodes and their addresses: a list that was given, and what a registry tells.

        >>> from kv_pool.migration.peers import Peers
        >>> peers = Peers()
        >>> peers.add("b", "127.0.0.1:7402")
        >>> peers.get_address("b"), [node.name for node in peers.list_nodes()]
        ('127.0.0.1:7402', ['b'])

    A name that was given wins over what a registry says of it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: dict[str, KnownNode] = {}
        self._learned: dict[str, KnownNode] = {}

    def add(self, name: str, address: str, location: NodeLocation = NodeLocation()) -> None:  # noqa: B008 (frozen)
        """Enter a node, in place of the one that had the name.

        Raises:
            InvalidArgumentError: no name, or no address such as `host:port`. Nothing has changed.
        """
        node = KnownNode(check_name(name), _check_address(address), location)
        with self._lock:
            self._given[name] = node

    def remove(self, name: str) -> bool:
        """Forget a node, whoever told of it. False if nobody has this name."""
        with self._lock:
            given = self._given.pop(name, None)
            learned = self._learned.pop(name, None)
            return given is not None or learned is not None

    def learn(self, nodes: Sequence[KnownNode]) -> None:
        """What a registry tells: these nodes, and of those that it told before no others any more.

        Nodes without an address that can be called are left out.
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

    def get_address(self, name: str) -> str:
        """Where a node listens, `host:port`.

        Raises:
            PeerUnavailableError: no node is known by this name; names those that are.
        """
        return self.get_node(name).address

    def get_node(self, name: str) -> KnownNode:
        """What is known of a node. Raises as `get_address`."""
        with self._lock:
            node = self._given.get(name) or self._learned.get(name)
            known = sorted({*self._given, *self._learned})
        if node is None:
            shown = ", ".join(known[:_SHOWN_NAMES])
            more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
            raise PeerUnavailableError(f"no node {name!r} is known; known are: {shown or 'none'}{more}")
        return node

    def list_nodes(self) -> list[KnownNode]:
        """All of them, by name."""
        with self._lock:
            nodes = {**self._learned, **self._given}
        return [nodes[name] for name in sorted(nodes)]

    def __len__(self) -> int:
        with self._lock:
            return len({*self._given, *self._learned})


class _Peer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    address: str
    network: str = ""
    rack: str = ""
    host: str = ""
    device: str = ""


class _PeersFile(msgspec.Struct, forbid_unknown_fields=True):
    """One file can have all settings of a node: its links, its peers, its publisher."""

    peers: list[_Peer] = []
    links: object = None
    publisher: object = None


def read_peers(path: str | PathLike[str]) -> Peers:
    """The peers of a TOML file.

        [[peers]]
        name = "gpu-node-2"
        address = "10.0.0.2:7400"
        rack = "r1"                  # and network, host, device: where it is, as far as that is known

    Raises:
        InvalidArgumentError: no such file, no TOML, or no such table in it; the message names the file.
    """
    try:
        with open(open_regular(path), "rb") as file:
            found = msgspec.convert(tomllib.load(file), _PeersFile)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: can not read the peers: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: this is no TOML: {error}") from error
    except msgspec.ValidationError as error:
        tables = "its tables are [[peers]], [links.NEARNESS] and [publisher]"
        raise InvalidArgumentError(f"{path}: {error}; {tables}") from error
    peers = Peers()
    names = set()
    for peer in found.peers:
        if peer.name in names:
            raise InvalidArgumentError(f"{path}: two peers are called {peer.name!r}")
        names.add(peer.name)
        try:
            peers.add(peer.name, peer.address, NodeLocation(peer.network, peer.rack, peer.host, peer.device))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{path}: peer {peer.name!r}: {error}") from error
    return peers


def parse_peer(text: str) -> KnownNode:
    """`name=host:port` as a node. Raises InvalidArgumentError for anything else."""
    name, separator, address = text.partition("=")
    if not separator:
        raise InvalidArgumentError(f"{text!r} is no peer; say name=host:port")
    return KnownNode(check_name(name.strip()), _check_address(address.strip()))


def check_name(name: str) -> str:
    """The name, if a node may have it.

    Raises:
        InvalidArgumentError: it is empty, longer than 64 characters, or has others than letters, digits and
            `._-`; names go into file names and onto command lines.
    """
    is_plain = name.isascii() and name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not (is_plain and len(name) <= 64 and name[0].isalnum()):
        raise InvalidArgumentError(
            f"{name!r} is no name of a node: 1 to 64 letters, digits, '.', '_' or '-', the first one a "
            "letter or digit"
        )
    return name


def _check_address(address: str) -> str:
    _, port = parse_address(address)
    if not port:
        raise InvalidArgumentError(f"{address!r} is nowhere to connect to: the port is 0")
    return address
