"""`PeerLinks`: how a node reaches others: calls by name, and readers that are kept for the next migration."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kv_pool.errors import InvalidArgumentError, MigrationError, MissingDependencyError, PeerUnavailableError
from kv_pool.migration.calls import Answer, LocalCalls, NodeCalls
from kv_pool.migration.messages import DescribeNode, Message, NodeDescription
from kv_pool.migration.peers import Peers
from kv_pool.migration.remote_calls import RemoteCalls
from kv_pool.migration.transfer_backend import BlockReader, TransferBackend

_MAX_IDLE_READERS = 4


class PeerLinks:
    """The nodes of this process that were connected, and those that `peers` knows an address of.

    Args:
        name: of this node.
        secret: None for a node that only knows others of its own process.

    Safe for several threads.
    """

    def __init__(
        self, name: str, peers: Peers, secret: bytes | None, backends: Sequence[TransferBackend]
    ) -> None:
        self._name = name
        self._peers = peers
        self._secret = secret
        self._backends = {backend.name: backend for backend in backends}
        self._lock = threading.Lock()
        self._local: dict[str, LocalCalls] = {}
        self._remote: dict[str, RemoteCalls] = {}
        # Where nodes listen that have asked to be pulled from, and that no list knows.
        self._told: dict[str, str] = {}
        self._idle_readers: dict[tuple[str, str], list[BlockReader]] = {}
        self._is_closed = False

    def connect(self, name: str, answer: Answer) -> None:
        """A node of this process. One that was known by this name is replaced."""
        with self._lock:
            self._local[name] = LocalCalls(answer, self._name)

    def list_local(self) -> list[str]:
        """Return the names of the nodes of this process that were connected."""
        with self._lock:
            return list(self._local)

    def learn_address(self, name: str, address: str) -> None:
        """A node has said where it listens; a list of peers knows better."""
        if address:
            with self._lock:
                self._told[name] = address

    def find_address(self, name: str) -> str:
        """Where a node listens. Raises PeerUnavailableError: it is not known; names those that are."""
        try:
            return self._peers.get_address(name)
        except PeerUnavailableError:
            with self._lock:
                address = self._told.get(name)
            if address is None:
                raise
            return address

    def find_calls(self, name: str) -> NodeCalls:
        """Raises PeerUnavailableError: not known, or this node has no secret, or was stopped."""
        with self._lock:
            if self._is_closed:
                raise PeerUnavailableError(f"node {self._name!r} was stopped")
            local = self._local.get(name)
        if local is not None:
            return local
        address = self.find_address(name)
        if self._secret is None:
            raise PeerUnavailableError(
                f"node {self._name!r} has no secret, so it can not talk to {name!r} at {address}"
            )
        replaced = None
        with self._lock:
            calls = self._remote.get(name)
            if calls is None or calls.address != address:
                replaced, calls = calls, RemoteCalls(address, self._secret, self._name)
                self._remote[name] = calls
        if replaced is not None:
            replaced.close()
        return calls

    def call(self, name: str, message: Message, timeout_s: float) -> Message:
        """Ask a node. Raises as `NodeCalls.call` and `find_calls`."""
        return self.find_calls(name).call(message, timeout_s)

    def describe(self, name: str, timeout_s: float) -> NodeDescription:
        """What a node says of itself. Raises as `call`; PeerUnavailableError if it has another name."""
        reply = self.call(name, DescribeNode(), timeout_s)
        if not isinstance(reply, NodeDescription):
            raise MigrationError(f"node {name!r} has answered DescribeNode with {type(reply).__name__}")
        if reply.name != name:
            raise PeerUnavailableError(
                f"the node where {name!r} should listen is called {reply.name!r}; is the list of peers right?"
            )
        return reply

    def take_reader(self, source: NodeDescription, only: str = "") -> BlockReader:
        """A reader of this node: one that was left, or a new one over the first way that works.

        Args:
            only: the name of the backend, the reader of which is a new one; "" for any.
        Raises:
            InvalidArgumentError: the two nodes have no backend in common.
            PeerUnavailableError: the last way did not work either.
        """
        with self._lock:
            idle = self._idle_readers.get((source.name, source.epoch), [])
            while idle and not only:
                reader = idle.pop()
                if reader.is_usable():
                    return reader
                reader.close()  # its source hangs up on readers that ask for nothing
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
            f"node {source.name!r} can be read by {', '.join(source.backends) or 'nothing'}, and this node "
            f"reads by {', '.join(self._backends) or 'nothing'}" + (f"; asked for is {only}" if only else "")
        )

    def leave_reader(self, source: NodeDescription, reader: BlockReader) -> None:
        """It has nothing under way, and is kept. Those of earlier lives of the node are closed."""
        to_close = []
        with self._lock:
            for key in [
                key for key in self._idle_readers if key[0] == source.name and key[1] != source.epoch
            ]:
                to_close += self._idle_readers.pop(key)
            idle = self._idle_readers.setdefault((source.name, source.epoch), [])
            if len(idle) < _MAX_IDLE_READERS and not self._is_closed:
                idle.append(reader)
            else:
                to_close.append(reader)
        for old in to_close:
            old.close()

    def close(self) -> None:
        """Hang up everywhere. What is under way fails with PeerUnavailableError."""
        with self._lock:
            self._is_closed = True
            readers = [reader for idle in self._idle_readers.values() for reader in idle]
            self._idle_readers.clear()
            remote = list(self._remote.values())
        for calls in remote:
            calls.close()
        for reader in readers:
            reader.close()


class PeerOfPull:
    """The source of a pull, by its name. See `PullPeer`."""

    def __init__(self, links: PeerLinks, name: str, timeout_s: float, backend: str = "") -> None:
        self._links = links
        self._name = name
        self._timeout_s = timeout_s
        self._backend = backend
        self.leave_reader = links.leave_reader

    def take_reader(self, source: NodeDescription) -> BlockReader:
        """As `PeerLinks.take_reader`, of the backend that the pull is for."""
        return self._links.take_reader(source, self._backend)

    def call(self, message: Message) -> Message:
        """As `PeerLinks.call`; a node of another name is refused."""
        if isinstance(message, DescribeNode):
            return self._links.describe(self._name, self._timeout_s)
        return self._links.call(self._name, message, self._timeout_s)
