"""`Announcer`: how a node announces itself to a registry, another node, and learns of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kv_pool.closing import Running
from kv_pool.errors import KVPoolError, PeerAuthenticationError, PeerUnavailableError
from kv_pool.loggers import get_logger
from kv_pool.migration.messages import AnnounceNode, NodeList
from kv_pool.migration.peers import Peers
from kv_pool.threads import start_thread

if TYPE_CHECKING:
    from kv_pool.migration.remote_calls import RemoteCalls

_logger = get_logger(__name__)


class Announcer(Running):
    """A thread that keeps a node registered and learns the other nodes from the registry.

    Args:
        make_announcement: `Migrator.make_announcement` of the node to announce, which must listen.
        peers: of that node; the registry's nodes are copied to it.
        registry: calls to the node that runs the registry, see `Migrator(is_registry=...)`.
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
