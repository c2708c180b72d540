"""`NodeRegistry`: the nodes that have announced themselves to this node; `Announcer`: how a node does it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_pool.closing import Running
from kv_pool.errors import InvalidArgumentError, KVPoolError, PeerAuthenticationError, PeerUnavailableError
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import parse_address
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeList
from kv_pool.migration.peers import Peers, check_name
from kv_pool.threads import start_thread

if TYPE_CHECKING:
    from kv_pool.migration.remote_calls import RemoteCalls

_logger = logging.getLogger(__name__)

MAX_TTL_S = 3600.0
"""The maximum time to live of an announcement, in seconds."""


@dataclass(frozen=True)
class _Entry:
    node: KnownNode
    incarnation: str
    replaced: str | None  # the incarnation that had this name before
    ends_s: float


class NodeRegistry:
    """A registry of announced nodes, each until its time to live ends. In memory, without sockets.

        >>> from kv_pool.migration.messages import AnnounceNode, NodeLocation
        >>> registry = NodeRegistry(clock=lambda: 0.0)
        >>> reply = registry.announce(AnnounceNode("b", "e1", "127.0.0.1:7402", NodeLocation(), ttl_s=15))
        >>> [(node.name, node.address) for node in reply.nodes]
        [('b', '127.0.0.1:7402')]

        unknown -> alive     announced
        alive   -> alive     announced again, by the same incarnation or a new one, which takes over the name
        alive   -> unknown   the time to live has ended, or announced with ttl_s 0
        replaced epochs are refused, so that the older of two nodes with the same name gets an error

    A restarted registry is empty until the nodes announce themselves again, within their time to live.
    Thread-safe.

    Args:
        clock: monotonic time in seconds.
        max_nodes: limit of entries; announcements of further nodes are refused.
    """

    def __init__(self, clock: Callable[[], float], max_nodes: int = 1024) -> None:
        if max_nodes < 1:
            raise InvalidArgumentError(f"max_nodes is {max_nodes}; it must be at least 1")
        self._clock = clock
        self._max_nodes = max_nodes
        self._lock = threading.Lock()
        self._entries: dict[NodeName, _Entry] = {}
        self._kept: dict[NodeName, KnownNode] = {}

    def keep(self, node: KnownNode) -> None:
        """Add a permanent entry: the registry's own node."""
        with self._lock:
            self._kept[check_name(node.name)] = node

    def announce(self, message: AnnounceNode) -> NodeList:
        """Record that a node is alive for `ttl_s` seconds from now; 0 removes the node.

        Returns:
            All registered nodes, the caller included.
        Raises:
            InvalidArgumentError: the name or the address is invalid; the time to live is negative or above
                `MAX_TTL_S`; the name is the registry's own, or another node has taken it over; the registry
                is full. Nothing has changed.
        """
        name, incarnation = check_name(message.name), message.incarnation
        if not 0 <= message.ttl_s <= MAX_TTL_S:
            raise InvalidArgumentError(f"ttl_s is {message.ttl_s}; it must be between 0 and {MAX_TTL_S:g} s")
        parse_address(message.address)
        with self._lock:
            now = self._expire()
            known = self._entries.get(name)
            if name in self._kept or (known is not None and known.replaced == incarnation):
                there = (self._kept.get(name) or self._entries[name].node).address
                raise InvalidArgumentError(
                    f"another node is named {name!r}, at {there}; rename one of the two"
                )
            is_same = known is not None and known.incarnation == incarnation
            if message.ttl_s == 0:
                if is_same:
                    del self._entries[name]
            elif known is None and len(self._entries) >= self._max_nodes:
                raise InvalidArgumentError(f"the registry is full: {self._max_nodes} nodes are registered")
            else:
                replaced = None if known is None else known.replaced if is_same else known.incarnation
                node = KnownNode(name, message.address, message.location)
                self._entries[name] = _Entry(node, incarnation, replaced, now + message.ttl_s)
            return self._list()

    def list_nodes(self) -> NodeList:
        """Return all nodes that are alive, sorted by name. O(nodes)."""
        with self._lock:
            self._expire()
            return self._list()

    def _list(self) -> NodeList:
        nodes = {name: entry.node for name, entry in self._entries.items()} | self._kept
        return NodeList([nodes[name] for name in sorted(nodes)])

    def _expire(self) -> float:
        now = self._clock()
        self._entries = {name: entry for name, entry in self._entries.items() if entry.ends_s > now}
        return now


class Announcer(Running):
    """A thread that keeps a node registered and learns the other nodes from the registry.

    Args:
        make_announcement: `Migrator.make_announcement` of the node to announce, which must listen.
        peers: of that node; the registry's nodes are copied to it.
        registry: calls to the node that runs the registry, see `Migrator(registry=...)`.
        ttl_s: time to live of an announcement. It is renewed every `ttl_s / 3` seconds.
        timeout_s: of each call.

    If the registry does not answer, the known peers stay as they are, and the next announcement tries again.
    The failure is logged once, and so is the recovery.
    """

    def __init__(
        self,
        make_announcement: Callable[[float], AnnounceNode],
        peers: Peers,
        registry: RemoteCalls,
        *,
        ttl_s: float = 15.0,
        timeout_s: float = 3.0,
    ) -> None:
        self._make_announcement = make_announcement
        self._peers = peers
        self._name = make_announcement(ttl_s).name
        self._registry = registry
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._is_failing = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Announce the node now, then periodically from a thread.

        Raises:
            PeerUnavailableError, PeerAuthenticationError: the registry does not answer or has another secret.
            InvalidArgumentError: the registry knows another node of this name.
            OutOfThreadsError: the system cannot start a thread.
            In all cases no thread runs, and `registry` is closed.
        """
        with ExitStack() as on_failure:
            on_failure.callback(self._registry.close)
            try:
                self._announce(self._ttl_s)
            except (PeerUnavailableError, PeerAuthenticationError) as error:
                raise type(error)(f"cannot announce node {self._name} to the registry: {error}") from error
            self._thread = start_thread(f"kv_pool {self._name} announces", self._run)
            on_failure.pop_all()

    def stop(self) -> None:
        """Stop the thread, remove the node from the registry and close the calls."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            try:
                self._announce(0.0)
            except KVPoolError as error:
                _logger.info("cannot remove node %s from the registry: %s", self._name, error)
        self._registry.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._ttl_s / 3):
            try:
                self._announce(self._ttl_s)
            except KVPoolError as error:
                if not self._is_failing:
                    _logger.warning("cannot announce node %s to the registry: %s", self._name, error)
                self._is_failing = True
            else:
                if self._is_failing:
                    _logger.warning("node %s is in the registry again", self._name)
                self._is_failing = False

    def _announce(self, ttl_s: float) -> None:
        reply = self._registry.call(self._make_announcement(ttl_s), self._timeout_s)
        if isinstance(reply, NodeList) and ttl_s:
            self._peers.learn([node for node in reply.nodes if node.name != self._name])
