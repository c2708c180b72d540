"""The known nodes of a node: configured, read from a file, or learned."""

import random

import pytest

from kv_pool.errors import InvalidArgumentError, PeerUnavailableError
from kv_pool.migration.messages import KnownNode
from kv_pool.migration.peers import Peers, parse_peer


def test_the_error_for_an_unknown_name_lists_known_ones():
    peers = Peers()
    with pytest.raises(PeerUnavailableError, match="node 'c' is unknown; known nodes: none"):
        peers.get_address("c")
    for number in range(12):
        peers.add(f"n{number:02}", f"10.0.0.{number}:7400")
    with pytest.raises(PeerUnavailableError, match=r"known nodes: n00, n01, .*, n09 and 2 more"):
        peers.get_address("c")
    assert peers.get_address("n03") == "10.0.0.3:7400"


def test_learn_skips_invalid_nodes():
    peers = Peers()
    peers.learn([KnownNode("a b", "10.0.0.2:1"), KnownNode("c", ""), KnownNode("d", "10.0.0.4:1")])
    assert [node.name for node in peers.list_nodes()] == ["d"]


def test_parse_peer_reads_name_and_address():
    assert parse_peer("b=127.0.0.1:7402") == KnownNode("b", "127.0.0.1:7402")
    for text in ("127.0.0.1:7402", "=127.0.0.1:7402", "b=nowhere", "b=127.0.0.1:0", "a/b=h:1", "-b=h:1"):
        with pytest.raises(InvalidArgumentError):
            parse_peer(text)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_match_a_model_of_two_dicts(seed):
    draw = random.Random(seed)
    peers, given, learned = Peers(), {}, {}
    for _ in range(100):
        name = draw.choice("abcdef")
        address = f"10.0.0.{draw.randrange(9)}:{draw.randrange(1, 9)}"
        match draw.choice(["add", "remove", "learn"]):
            case "add":
                peers.add(name, address)
                given[name] = address
            case "remove":
                assert peers.remove(name) == (name in given or name in learned)
                given.pop(name, None)
                learned.pop(name, None)
            case "learn":
                learned = dict.fromkeys(draw.sample("abcdef", draw.randrange(6)), address)
                peers.learn([KnownNode(other, there) for other, there in learned.items()])
        expected = {**learned, **given}
        assert {node.name: peers.get_address(node.name) for node in peers.list_nodes()} == expected
        assert [node.name for node in peers.list_nodes()] == sorted(expected)
