"""Nodes of a registry: announced, expired, replaced."""

import random

import pytest

from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.messages import AnnounceNode, KnownNode, NodeLocation
from kv_pool.migration.registry import MAX_TTL_S, NodeRegistry


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def say(name, incarnation="e1", address="10.0.0.1:7400", ttl_s=15.0):
    return AnnounceNode(name, incarnation, address, NodeLocation(), ttl_s)


def names(told):
    return [node.name for node in told.nodes]


def test_a_node_is_listed_until_its_ttl_ends():
    clock = Clock()
    registry = NodeRegistry(clock)
    registry.keep(KnownNode("registry", "10.0.0.9:7400"))
    assert names(registry.announce(say("b"))) == ["b", "registry"]
    clock.now = 10.0
    assert names(registry.announce(say("c"))) == ["b", "c", "registry"]
    clock.now = 15.0
    assert names(registry.list_nodes()) == ["c", "registry"]
    registry.announce(say("c", ttl_s=0))
    assert names(registry.list_nodes()) == ["registry"]


def test_a_restarted_node_takes_over_its_name():
    registry = NodeRegistry(Clock())
    registry.announce(say("b", "e1", "10.0.0.1:1"))
    [node] = registry.announce(say("b", "e2", "10.0.0.2:2")).nodes
    assert node.address == "10.0.0.2:2"
    with pytest.raises(InvalidArgumentError, match=r"another node is named 'b', at 10\.0\.0\.2:2"):
        registry.announce(say("b", "e1", "10.0.0.1:1"))
    registry.announce(say("b", "e3", ttl_s=0))  # not its own entry
    assert names(registry.list_nodes()) == ["b"]


def test_invalid_announcements_change_nothing():
    registry = NodeRegistry(Clock(), max_nodes=1)
    registry.keep(KnownNode("a", "10.0.0.9:7400"))
    registry.announce(say("b"))
    for message in (
        say("a"),
        say("c"),
        say("no name"),
        say("b", address="nowhere"),
        say("b", ttl_s=-1.0),
        say("b", ttl_s=MAX_TTL_S + 1),
        say("b", ttl_s=float("nan")),
    ):
        with pytest.raises(InvalidArgumentError):
            registry.announce(message)
        assert names(registry.list_nodes()) == ["a", "b"]
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        NodeRegistry(Clock(), max_nodes=0)


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
def test_random_announcements_match_a_slow_model(seed):
    draw = random.Random(seed)
    clock = Clock()
    registry, slow = NodeRegistry(clock, max_nodes=4), SlowRegistry()
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
            with pytest.raises(InvalidArgumentError):
                registry.announce(message)
        else:
            registry.announce(message)
            slow.accepted.append((clock.now, message))
        assert [(node.name, node.address) for node in registry.list_nodes().nodes] == sorted(
            (name, entry[0].address) for name, entry in slow.find_alive(clock.now).items()
        )
