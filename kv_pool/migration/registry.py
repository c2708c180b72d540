"""`NodeRegistry`: which nodes are alive, as far as one node has been told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.addresses import parse_address
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeList
from kv_pool.migration.peers import check_name

MAX_TTL_S = 3600.0
"""Longer than that nobody is believed to be alive without saying so again."""


@dataclass(frozen=True)
class _Entry:
    node: KnownNode
    epoch: str
    ends_s: float


class NodeRegistry:
    """Nodes that have said that they are here, each until its time is over. In memory, without sockets.

        >>> from kv_pool.migration.messages import AnnounceNode, NodeLocation
        >>> registry = NodeRegistry(clock=lambda: 0.0)
        >>> told = registry.announce(AnnounceNode("b", "e1", "127.0.0.1:7402", NodeLocation(), ttl_s=15))
        >>> [(node.name, node.address) for node in told.nodes]
        [('b', '127.0.0.1:7402')]

        unknown -> alive     announced
        alive   -> alive     announced again by the same epoch; or by another one, which takes the name over
        alive   -> unknown   its time is over, or announced with ttl_s 0: it says goodbye
        replaced epochs are refused, so that of two nodes with one name the older one hears of it

    A registry that starts anew knows nobody until they announce themselves again, which is at most their
    time to live later. Thread-safe.

    Args:
        clock: seconds, never falling.
        max_nodes: entries at most; who comes then is refused.
    """

    def __init__(self, clock: Callable[[], float], max_nodes: int = 1024) -> None:
        if max_nodes < 1:
            raise InvalidArgumentError(f"max_nodes is {max_nodes}; a registry knows at least 1 node")
        self._clock = clock
        self._max_nodes = max_nodes
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._kept: dict[str, KnownNode] = {}
        # By name the epoch that was replaced last; forgotten when the name is.
        self._replaced: dict[str, str] = {}

    def keep(self, node: KnownNode) -> None:
        """Enter a node that is always here: the registry's own."""
        with self._lock:
            self._kept[check_name(node.name)] = node

    def announce(self, message: AnnounceNode) -> NodeList:
        """Note that a node is alive for `ttl_s` seconds from now; with 0 that it is not.

        Returns:
            Everybody, the caller included.
        Raises:
            InvalidArgumentError: no name, no address, a time to live that is negative or above `MAX_TTL_S`;
                the name is the registry's own, or another node has taken it over; too many nodes. Nothing has
                changed.
        """
        name, epoch = check_name(message.name), message.epoch
        if not 0 <= message.ttl_s <= MAX_TTL_S:
            raise InvalidArgumentError(
                f"ttl_s is {message.ttl_s}; a node is announced for 0 to {MAX_TTL_S} s"
            )
        parse_address(message.address)
        with self._lock:
            now = self._expire()
            known = self._entries.get(name)
            if name in self._kept or self._replaced.get(name) == epoch:
                there = self._kept[name].address if name in self._kept else self._describe(name)
                raise InvalidArgumentError(
                    f"another node is called {name!r}, at {there}; give one of the two another name"
                )
            if message.ttl_s == 0:
                if known is not None and known.epoch == epoch:
                    self._forget(name)
            elif known is None and len(self._entries) >= self._max_nodes:
                raise InvalidArgumentError(f"{self._max_nodes} nodes are registered already")
            else:
                if known is not None and known.epoch != epoch:
                    self._replaced[name] = known.epoch
                node = KnownNode(name, message.address, message.location)
                self._entries[name] = _Entry(node, epoch, now + message.ttl_s)
            return self._list()

    def list_nodes(self) -> NodeList:
        """Everybody who is alive now, by name. O(nodes)."""
        with self._lock:
            self._expire()
            return self._list()

    def _list(self) -> NodeList:
        nodes = {**{name: entry.node for name, entry in self._entries.items()}, **self._kept}
        return NodeList([nodes[name] for name in sorted(nodes)])

    def _expire(self) -> float:
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.ends_s <= now]:
            self._forget(name)
        return now

    def _forget(self, name: str) -> None:
        del self._entries[name]
        self._replaced.pop(name, None)

    def _describe(self, name: str) -> str:
        return self._entries[name].node.address
