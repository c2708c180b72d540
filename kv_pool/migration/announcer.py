"""`Announcer`: tells a registry that this node is here, and learns from it who else is."""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from kv_pool.errors import KVPoolError
from kv_pool.migration.calls import NodeCalls
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeList
from kv_pool.migration.migrator import Migrator
from kv_pool.threads import start_thread

_logger = logging.getLogger(__name__)


class Announcer:
    """Keeps a node in a registry, and the registry's nodes in the node's `peers`.

    Args:
        migrator: the node; it listens.
        registry: calls to the node that keeps the registry, see `Migrator(registry=...)`.
        ttl_s: for how long the registry believes it. It is told three times as often.
        timeout_s: for each call.

    A registry that does not answer changes nothing: the peers that it told of stay as they are, and it is
    asked again. That is logged once, and once more when it answers again.
    """

    def __init__(
        self, migrator: Migrator, registry: NodeCalls, *, ttl_s: float = 15.0, timeout_s: float = 3.0
    ) -> None:
        self._migrator = migrator
        self._registry = registry
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._is_failing = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Announce the node now, and again and again from a thread.

        Raises:
            PeerUnavailableError, PeerAuthenticationError: there is no registry, or it has another secret.
            InvalidArgumentError: it knows another node of this name.
            OutOfThreadsError: the system starts no thread.
            In all cases nothing runs, and the calls are closed.
        """
        try:
            self._announce(self._ttl_s)
            self._thread = start_thread(f"kv_pool {self._migrator.name} announces", self._run)
        except BaseException:
            self._registry.close()
            raise

    def stop(self) -> None:
        """Say goodbye, and hang up."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            try:
                self._announce(0.0)
            except KVPoolError as error:
                _logger.info("the registry was not told that node %s goes: %s", self._migrator.name, error)
        self._registry.close()

    def __enter__(self) -> Announcer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stopping.wait(self._ttl_s / 3):
            try:
                self._announce(self._ttl_s)
            except KVPoolError as error:
                if not self._is_failing:
                    _logger.warning("node %s is not in the registry any more: %s", self._migrator.name, error)
                self._is_failing = True
            else:
                if self._is_failing:
                    _logger.warning("node %s is in the registry again", self._migrator.name)
                self._is_failing = False

    def _announce(self, ttl_s: float) -> None:
        node = self._migrator
        said = AnnounceNode(node.name, node.epoch, node.address, node.location, ttl_s)
        told = self._registry.call(said, self._timeout_s)
        if isinstance(told, NodeList) and ttl_s:
            self.learn(told.nodes)

    def learn(self, nodes: list[KnownNode]) -> None:
        """Enter these nodes as peers, all but ourselves."""
        self._migrator.peers.learn([node for node in nodes if node.name != self._migrator.name])
