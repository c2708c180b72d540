"""Nodes of a registry: announced, expired, replaced; a node that announces itself and learns the others."""

import logging
import random
import threading

import pytest
from adapter.made_pool import make, make_site, make_storage
from migration.made_nodes import Clock

from kv_pool.errors import InvalidArgumentError, PeerUnavailableError
from kv_pool.migration import peers as peers_module
from kv_pool.migration.announcer import Announcer
from kv_pool.migration.backends.tcp import TcpBackend
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeLocation
from kv_pool.migration.migrator import Migrator
from kv_pool.migration.peers import MAX_TTL_S, Peers

SECRET = b"sixteen bytes or more"
REGISTRY = KnownNode("r", "10.0.0.9:7400")


def say(name, incarnation="e1", address="10.0.0.1:7400", ttl_s=15.0):
    return AnnounceNode(name, incarnation, address, NodeLocation(), ttl_s)


def names(nodes):
    return [node.name for node in nodes]


def test_a_node_is_listed_until_its_ttl_ends():
    clock = Clock()
    peers = Peers(clock)
    assert names(peers.announce(say("b"), REGISTRY).nodes) == ["b", "r"]
    clock.now = 10.0
    assert names(peers.announce(say("c"), REGISTRY).nodes) == ["b", "c", "r"]
    assert peers.get_address("b") == "10.0.0.1:7400"
    clock.now = 15.0
    assert "b" not in peers
    assert names(peers.list_nodes()) == ["c"]
    assert peers.remove("c")
    assert not peers.remove("c")
    peers.announce(say("d"), REGISTRY)
    peers.announce(say("d", ttl_s=0), REGISTRY)
    assert peers.list_nodes() == []


def test_configured_and_learned_addresses_come_first():
    peers = Peers(Clock())
    peers.announce(say("b"), REGISTRY)
    peers.learn([KnownNode("b", "10.0.0.2:7400")])
    assert peers.get_address("b") == "10.0.0.2:7400"
    peers.add("b", "10.0.0.3:7400")
    assert peers.get_address("b") == "10.0.0.3:7400"
    assert peers.remove("b") is True
    assert peers.remove("b") is False


def test_invalid_announcements_change_nothing(monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_ANNOUNCED", 1)
    peers = Peers(Clock())
    peers.announce(say("b"), REGISTRY)
    for message in (
        say("r"),
        say("c"),
        say("no name"),
        say("b", address="nowhere"),
        say("b", address="10.0.0.1:0"),
        say("b", ttl_s=-1.0),
        say("b", ttl_s=MAX_TTL_S + 1),
        say("b", ttl_s=float("nan")),
    ):
        with pytest.raises(InvalidArgumentError):
            peers.announce(message, REGISTRY)
        assert names(peers.list_nodes()) == ["b"]


class SlowRegistry:
    """A slow model: a list of all accepted announcements, searched for the nodes that are alive."""

    def __init__(self):
        self.accepted = []  # (time, message)

    def find_alive(self, now):
        alive = {}
        for at, message in self.accepted:
            alive = {name: entry for name, entry in alive.items() if entry[1] > at}
            known = alive.get(message.name)
            if message.ttl_s == 0:
                if known is not None and known[0].incarnation == message.incarnation:
                    del alive[message.name]
                continue
            replaced = known[2] if known else None
            if known and known[0].incarnation != message.incarnation:
                replaced = known[0].incarnation
            alive[message.name] = (message, at + message.ttl_s, replaced)
        return {name: entry for name, entry in alive.items() if entry[1] > now}


@pytest.mark.parametrize("seed", range(20))
def test_random_announcements_match_a_slow_model(seed, monkeypatch):
    monkeypatch.setattr(peers_module, "MAX_ANNOUNCED", 4)
    draw = random.Random(seed)
    clock = Clock()
    peers, slow = Peers(clock), SlowRegistry()
    for _ in range(200):
        clock.now += draw.choice([0.0, 0.5, 3.0])
        message = say(
            draw.choice("abcdef"),
            draw.choice(["e1", "e2", "e3"]),
            f"10.0.0.{draw.randrange(9)}:1",
            draw.choice([0.0, 1.0, 5.0]),
        )
        alive = slow.find_alive(clock.now)
        is_replaced = message.name in alive and alive[message.name][2] == message.incarnation
        is_full = message.ttl_s > 0 and message.name not in alive and len(alive) >= 4
        if is_replaced or is_full:
            reason = "another node is named" if is_replaced else "the registry is full: 4 nodes"
            with pytest.raises(InvalidArgumentError, match=reason):
                peers.announce(message, REGISTRY)
        else:
            peers.announce(message, REGISTRY)
            slow.accepted.append((clock.now, message))
        assert [(node.name, node.address) for node in peers.list_nodes()] == sorted(
            (name, entry[0].address) for name, entry in slow.find_alive(clock.now).items()
        )


# ---- an announcer -------------------------------------------------------------------------------


class RegistryCalls:
    """Counted calls to a registry that can be made unavailable."""

    def __init__(self, registry=REGISTRY):
        self.peers = Peers(Clock())
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
        return self.peers.announce(message, self.registry)

    def wait_for_calls(self, count):
        with self.called:
            assert self.called.wait_for(lambda: self.num_calls >= count, 30)

    def close(self):
        self.is_closed = True


@pytest.fixture
def node():
    site = make_site(make(4, storage=make_storage(5)))
    with Migrator("a", site, backends=[TcpBackend(site.storage)], secret=SECRET, listen="127.0.0.1:0") as a:
        yield a


def test_a_running_announcer_registers_and_learns_peers(node):
    calls = RegistryCalls()
    calls.peers.announce(say("b"), REGISTRY)
    with Announcer(node.make_announcement, node.peers, calls, ttl_s=0.03):
        assert names(calls.peers.list_nodes()) == ["a", "b"]
        assert names(node.peers.list_nodes()) == ["b", "r"]
        calls.peers.announce(say("c"), REGISTRY)
        calls.wait_for_calls(calls.num_calls + 2)
        assert names(node.peers.list_nodes()) == ["b", "c", "r"]
    assert names(calls.peers.list_nodes()) == ["b", "c"]
    assert calls.is_closed


def test_a_registry_outage_keeps_the_peers(node, caplog):
    calls = RegistryCalls()
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
    calls = RegistryCalls()
    calls.is_gone = True
    with pytest.raises(PeerUnavailableError, match="cannot announce node a to the registry: no answer"):
        Announcer(node.make_announcement, node.peers, calls).start()
    assert calls.is_closed
    calls = RegistryCalls(KnownNode("a", "10.0.0.9:7400"))
    with pytest.raises(InvalidArgumentError, match=r"another node is named 'a', at 10\.0\.0\.9:7400"):
        Announcer(node.make_announcement, node.peers, calls).start()
