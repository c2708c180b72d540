"""A node announces itself to a registry and learns the other nodes."""

import logging
import threading

import pytest
from adapter.made_pool import make, make_site, make_storage

from kv_pool.errors import InvalidArgumentError, PeerUnavailableError
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeLocation
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.registry import Announcer, NodeRegistry

SECRET = b"sixteen bytes or more"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class RegistryCalls:
    """Counted calls to a registry that can be made unavailable."""

    def __init__(self, registry):
        self.registry = registry
        self.is_gone = False
        self.is_closed = False
        self.num_calls = 0
        self.called = threading.Condition()

    def call(self, message, timeout_s):
        with self.called:
            self.num_calls += 1
            self.called.notify_all()
            if self.is_gone:
                raise PeerUnavailableError("no answer")
        return self.registry.announce(message)

    def wait_for_calls(self, count):
        with self.called:
            assert self.called.wait_for(lambda: self.num_calls >= count, 30)

    def close(self):
        self.is_closed = True


def make_registry():
    registry = NodeRegistry(Clock())
    registry.keep(KnownNode("r", "10.0.0.9:7400"))
    return registry


@pytest.fixture
def node():
    site = make_site(make(4, storage=make_storage(5)))
    with Migrator("a", site, backends=[TcpBackend(site.storage)], secret=SECRET, listen="127.0.0.1:0") as a:
        yield a


def names(nodes):
    return [known.name for known in nodes]


def test_a_running_announcer_registers_and_learns_peers(node):
    calls = RegistryCalls(make_registry())
    calls.registry.announce(AnnounceNode("b", "e", "10.0.0.2:7400", NodeLocation(), 100.0))
    with Announcer(node.make_announcement, node.peers, calls, ttl_s=0.03):
        assert names(calls.registry.list_nodes().nodes) == ["a", "b", "r"]
        assert names(node.peers.list_nodes()) == ["b", "r"]
        calls.registry.announce(AnnounceNode("c", "e", "10.0.0.3:7400", NodeLocation(), 100.0))
        calls.wait_for_calls(calls.num_calls + 2)
        assert names(node.peers.list_nodes()) == ["b", "c", "r"]
    assert names(calls.registry.list_nodes().nodes) == ["b", "c", "r"]
    assert calls.is_closed


def test_a_registry_outage_keeps_the_peers(node, caplog):
    calls = RegistryCalls(make_registry())
    with caplog.at_level(logging.WARNING), Announcer(node.make_announcement, node.peers, calls, ttl_s=0.03):
        calls.is_gone = True
        calls.wait_for_calls(calls.num_calls + 4)
        assert names(node.peers.list_nodes()) == ["r"]
        calls.is_gone = False
        calls.wait_for_calls(calls.num_calls + 3)
    told = [record.message for record in caplog.records if "registry" in record.message]
    assert told == [
        "cannot announce node a to the registry: no answer",
        "node a is in the registry again",
    ]


def test_start_fails_without_a_registry_or_with_a_taken_name(node):
    calls = RegistryCalls(make_registry())
    calls.is_gone = True
    with pytest.raises(PeerUnavailableError, match="cannot announce node a to the registry: no answer"):
        Announcer(node.make_announcement, node.peers, calls).start()
    assert calls.is_closed
    registry = NodeRegistry(Clock())
    registry.keep(KnownNode("a", "10.0.0.9:7400"))
    with pytest.raises(InvalidArgumentError, match=r"another node is named 'a', at 10\.0\.0\.9:7400"):
        Announcer(node.make_announcement, node.peers, RegistryCalls(registry)).start()
