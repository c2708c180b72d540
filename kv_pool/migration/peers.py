"""`Peers`: names and addresses of other nodes; `PeerLinks`: calls to them, and readers of their blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kv_pool.errors import InvalidArgumentError, MissingDependencyError, PeerUnavailableError
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import parse_address
from kv_pool.migration.messages import (
    AnnounceNode,
    Answer,
    KnownNode,
    Message,
    NodeDescription,
    NodeList,
    NodeLocation,
    OpenBulk,
    call_local,
)
from kv_pool.migration.transfer_backend import BlockReader, TransferBackend

if TYPE_CHECKING:
    from kv_pool.migration.remote_calls import Bulk, RemoteCalls

_SHOWN_NAMES = 10
_MAX_IDLE_READERS = 4

MAX_ANNOUNCED = 1024
"""The maximum number of announced nodes."""
MAX_TTL_S = 3600.0
"""The maximum time to live of an announcement, in seconds."""


@dataclass(frozen=True)
class _Announced:
    node: KnownNode
    incarnation: str
    replaced: str | None  # the incarnation that had this name before
    ends_s: float


class Peers:
    """Names and addresses of nodes: configured ones, learned ones, and those that announce themselves here.

        >>> from kv_pool.migration.peers import Peers
        >>> peers = Peers()
        >>> peers.add("b", "127.0.0.1:7402")
        >>> peers.get_address("b"), [node.name for node in peers.list_nodes()]
        ('127.0.0.1:7402', ['b'])

    A configured node takes precedence over a learned one of the same name, and that over an announced one.
    Thread-safe.

        unknown   -> announced  announced
        announced -> announced  again, by the same incarnation or a new one, which takes over the name
        announced -> unknown    the time to live has ended, or announced with ttl_s 0
        replaced incarnations are refused, so that the older of two nodes with one name gets an error

    A restarted registry is empty until the nodes announce themselves again, within their time to live.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._given: dict[NodeName, KnownNode] = {}
        self._learned: dict[NodeName, KnownNode] = {}
        self._announced: dict[NodeName, _Announced] = {}

    def add(self, name: NodeName, address: str, location: NodeLocation = NodeLocation()) -> None:  # noqa: B008 (frozen)
        """Add a node, replacing a node of the same name.

        Raises:
            InvalidArgumentError: the name or the address is invalid. Nothing has changed.
        """
        node = KnownNode(check_name(name), _check_address(address), location)
        with self._lock:
            self._given[name] = node

    def remove(self, name: NodeName) -> bool:
        """Remove a node. Return False if the name is unknown."""
        with self._lock:
            found = [self._given.pop(name, None), self._learned.pop(name, None)]
            return self._announced.pop(name, None) is not None or any(found)

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

    def announce(self, message: AnnounceNode, registry: KnownNode) -> NodeList:
        """Record that a node is alive for `ttl_s` seconds from now; 0 removes the node.

        Args:
            registry: the node that was called.
        Returns:
            The announced nodes, the caller included, and the registry, sorted by name.
        Raises:
            InvalidArgumentError: the name or the address is invalid; the time to live is negative or above
                `MAX_TTL_S`; the name is the registry's own, or another node has taken it over; there are
                `MAX_ANNOUNCED` other nodes. Nothing has changed.
        """
        node = KnownNode(check_name(message.name), _check_address(message.address), message.location)
        if not 0 <= message.ttl_s <= MAX_TTL_S:
            raise InvalidArgumentError(f"ttl_s is {message.ttl_s}; it must be between 0 and {MAX_TTL_S:g} s")
        with self._lock:
            announced = self._expire()
            known = announced.get(node.name)
            is_same = known is not None and known.incarnation == message.incarnation
            is_replaced = known is not None and known.replaced == message.incarnation
            if node.name == registry.name or is_replaced:
                there = registry if known is None else known.node
                raise InvalidArgumentError(
                    f"another node is named {node.name!r}, at {there.address}; rename one of the two"
                )
            if message.ttl_s == 0:
                if is_same:
                    del announced[node.name]
            elif known is None and len(announced) >= MAX_ANNOUNCED:
                raise InvalidArgumentError(f"the registry is full: {len(announced)} nodes are registered")
            else:
                replaced = None if known is None else known.replaced if is_same else known.incarnation
                ends_s = self._clock() + message.ttl_s
                announced[node.name] = _Announced(node, message.incarnation, replaced, ends_s)
            alive = [registry, *(one.node for one in announced.values())]
        return NodeList(sorted(alive, key=lambda one: one.name))

    def __contains__(self, name: NodeName) -> bool:
        return name in self._list()

    def get_address(self, name: NodeName) -> str:
        """Return the address of a node, `host:port`.

        Raises:
            PeerUnavailableError: the name is unknown; the message lists the known names.
        """
        nodes = self._list()
        if name not in nodes:
            known = sorted(nodes)
            shown = ", ".join(known[:_SHOWN_NAMES])
            more = f" and {len(known) - _SHOWN_NAMES} more" if len(known) > _SHOWN_NAMES else ""
            raise PeerUnavailableError(f"node {name!r} is unknown; known nodes: {shown or 'none'}{more}")
        return nodes[name].address

    def list_nodes(self) -> list[KnownNode]:
        """Return all nodes, sorted by name."""
        nodes = self._list()
        return [nodes[name] for name in sorted(nodes)]

    def _list(self) -> dict[NodeName, KnownNode]:
        with self._lock:
            announced = {name: one.node for name, one in self._expire().items()}
            return announced | self._learned | self._given

    def _expire(self) -> dict[NodeName, _Announced]:
        """Return the announced nodes that are alive."""
        now = self._clock()
        self._announced = {name: one for name, one in self._announced.items() if one.ends_s > now}
        return self._announced


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


class PeerLinks:
    """Connections to the connected nodes of this process and to the nodes in `peers`. Thread-safe.

    Args:
        name: of this node.
        secret: None for a node that reaches nodes of its own process only.
    """

    def __init__(
        self, name: NodeName, peers: Peers, secret: bytes | None, backends: Sequence[TransferBackend]
    ) -> None:
        self._name = name
        self._peers = peers
        self._secret = secret
        self._backends = {backend.name: backend for backend in backends}
        self._lock = threading.Lock()
        self._local: dict[NodeName, Answer] = {}
        self._remote: dict[NodeName, RemoteCalls] = {}
        # Addresses that pushing nodes have sent; used for names that `peers` does not have.
        self._sent_addresses: dict[NodeName, str] = {}
        self._idle_readers: dict[tuple[NodeName, str], list[BlockReader]] = {}
        self._is_closed = False

    def connect(self, name: NodeName, answer: Answer) -> None:
        """Add a node of this process, replacing one with the same name."""
        with self._lock:
            self._local[name] = answer

    def list_local(self) -> list[NodeName]:
        """Return the names of the connected nodes of this process."""
        with self._lock:
            return list(self._local)

    def learn_address(self, name: NodeName, address: str) -> None:
        """Record the address that a node has sent. An address in `peers` takes precedence."""
        if address:
            with self._lock:
                self._sent_addresses[name] = address

    def call(self, name: NodeName, message: Message, timeout_s: float) -> Message:
        """Send a message to a node and return its reply.

        Raises:
            PeerUnavailableError: the name is unknown, this node has no secret or was stopped, the called node
                describes itself by another name, or there was no reply in time; a node of this process
                answers in the caller's thread, however long it takes.
            Other errors of `RemoteCalls.call`.
        """
        with self._lock:
            self._check_open()
            local = self._local.get(name)
        if local is not None:
            reply = call_local(local, message, self._name)
        else:
            reply = self._find_remote(name).call(message, timeout_s)
        if isinstance(reply, NodeDescription) and reply.name != name:
            raise PeerUnavailableError(
                f"the node at the address of {name!r} is named {reply.name!r}; check the list of peers"
            )
        return reply

    def connect_bulk(self, name: NodeName, message: OpenBulk, timeout_s: float) -> Bulk:
        """Open a connection to a node's backend. The caller closes it.

        Raises:
            PeerUnavailableError: as for `call`.
            Other errors of `RemoteCalls.connect_bulk`.
        """
        return self._find_remote(name).connect_bulk(message, timeout_s)

    def _find_remote(self, name: NodeName) -> RemoteCalls:
        with self._lock:
            sent = self._sent_addresses.get(name)
        address = sent if sent and name not in self._peers else self._peers.get_address(name)
        if self._secret is None:
            raise PeerUnavailableError(
                f"node {self._name!r} has no secret, so it cannot connect to {name!r} at {address}"
            )
        from kv_pool.migration.remote_calls import RemoteCalls

        replaced = None
        with self._lock:
            self._check_open()
            calls = self._remote.get(name)
            if calls is None or calls.address != address:
                replaced, calls = calls, RemoteCalls(address, self._secret, self._name)
                self._remote[name] = calls
        if replaced is not None:
            replaced.close()
        return calls

    def _check_open(self) -> None:
        if self._is_closed:
            raise PeerUnavailableError(f"node {self._name!r} was stopped")

    def take_reader(self, source: NodeDescription, only: str = "") -> BlockReader:
        """Return a reader of a node: an idle one, or a new one of the first common backend that works.

        Args:
            only: the name of the only backend to use, always with a new reader; "" for any.
        Raises:
            InvalidArgumentError: the two nodes have no backend in common.
            PeerUnavailableError, MissingDependencyError: no common backend works; the error of the last one.
        """
        with self._lock:
            idle = self._idle_readers.get((source.name, source.incarnation), [])
            while idle and not only:
                reader = idle.pop()
                if reader.is_usable():
                    return reader
                reader.close()  # the source closes idle connections
        failure: PeerUnavailableError | MissingDependencyError | None = None
        for name, description in source.backends.items():
            backend = self._backends.get(name)
            if backend is None or only not in ("", name):
                continue
            try:
                return backend.open(source.name, description)
            except (PeerUnavailableError, MissingDependencyError) as error:
                failure = error
        if failure is not None:
            raise failure
        raise InvalidArgumentError(
            f"no common backend: node {source.name!r} has {', '.join(source.backends) or 'none'}, this node "
            f"has {', '.join(self._backends) or 'none'}" + (f"; requested: {only}" if only else "")
        )

    def return_reader(self, source: NodeDescription, reader: BlockReader) -> None:
        """Keep an idle reader for the next migration. Close readers of earlier incarnations of the node."""
        to_close = []
        with self._lock:
            for key in [
                key for key in self._idle_readers if key[0] == source.name and key[1] != source.incarnation
            ]:
                to_close += self._idle_readers.pop(key)
            idle = self._idle_readers.setdefault((source.name, source.incarnation), [])
            if len(idle) < _MAX_IDLE_READERS and not self._is_closed:
                idle.append(reader)
            else:
                to_close.append(reader)
        for old in to_close:
            old.close()

    def close(self) -> None:
        """Close all connections. Calls in progress fail with PeerUnavailableError."""
        with self._lock:
            self._is_closed = True
            readers = [reader for idle in self._idle_readers.values() for reader in idle]
            self._idle_readers.clear()
            remote = list(self._remote.values())
        for calls in remote:
            calls.close()
        for reader in readers:
            reader.close()
