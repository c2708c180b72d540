"""`NodeRegistry`: the nodes that have announced themselves to this node."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kv_pool.errors import InvalidArgumentError
from kv_pool.ids import NodeName
from kv_pool.migration.addresses import parse_address
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeList
from kv_pool.migration.peers import check_name

MAX_TTL_S = 3600.0
"""The maximum time to live of an announcement, in seconds."""


@dataclass(frozen=True)
class _Entry:
    node: KnownNode
    incarnation: str
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
        # Name -> the incarnation that was replaced last; removed together with the name.
        self._replaced: dict[NodeName, str] = {}

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
            if name in self._kept or self._replaced.get(name) == incarnation:
                there = (self._kept.get(name) or self._entries[name].node).address
                raise InvalidArgumentError(
                    f"another node is named {name!r}, at {there}; rename one of the two"
                )
            if message.ttl_s == 0:
                if known is not None and known.incarnation == incarnation:
                    self._forget(name)
            elif known is None and len(self._entries) >= self._max_nodes:
                raise InvalidArgumentError(f"the registry is full: {self._max_nodes} nodes are registered")
            else:
                if known is not None and known.incarnation != incarnation:
                    self._replaced[name] = known.incarnation
                node = KnownNode(name, message.address, message.location)
                self._entries[name] = _Entry(node, incarnation, now + message.ttl_s)
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
        for name in [name for name, entry in self._entries.items() if entry.ends_s <= now]:
            self._forget(name)
        return now

    def _forget(self, name: NodeName) -> None:
        del self._entries[name]
        self._replaced.pop(name, None)
