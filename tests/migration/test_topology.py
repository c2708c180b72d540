"""Nearness of nodes, the cost of links, and the ranking of targets."""

import random

import pytest

from kv_pool.errors import InvalidArgumentError
from kv_pool.migration.messages import KnownNode, NodeDescription, NodeLocation
from kv_pool.migration.topology import (
    ASSUMED_LINKS,
    Link,
    Nearness,
    Topology,
    find_nearness,
    read_peers,
    read_topology,
)
from kv_pool.storage.block_layout import BlockLayout

HERE = NodeLocation(network="n1", rack="r1", host="h1", device="cuda:0")
LAYOUT = BlockLayout("bytes", 1000, 16)


def node(name, num_free_blocks=100, layout=LAYOUT, sequence_kind="", **location):
    where = NodeLocation(**location)
    return NodeDescription(name, "e", layout, num_free_blocks, 100, {}, where, sequence_kind=sequence_kind)


def test_nodes_with_another_kind_of_sequences_are_passed_over():
    nodes = [node("same", sequence_kind="odd"), node("other", sequence_kind="even"), node("silent")]
    ranking = Topology().rank(HERE, 1, 1, nodes, sequence_kind="odd")
    assert [target.name for target in ranking.targets] == ["same", "silent"]
    assert [(one.name, one.reason) for one in ranking.excluded] == [
        ("other", "it takes even, and these are odd")
    ]
    assert len(Topology().rank(HERE, 1, 1, nodes).targets) == 3


@pytest.mark.parametrize(
    ("there", "nearness"),
    [
        (HERE, Nearness.DEVICE),
        (NodeLocation("n1", "r1", "h1", "cuda:1"), Nearness.HOST),
        (NodeLocation("n1", "r1", "h2", "cuda:0"), Nearness.RACK),
        (NodeLocation("n1", "r2", "h1", "cuda:0"), Nearness.NETWORK),
        (NodeLocation("n2", "r1", "h1", "cuda:0"), Nearness.ELSEWHERE),
        (NodeLocation(host="h1"), Nearness.HOST),
        (NodeLocation(host="h1", device="cuda:0"), Nearness.DEVICE),
        (NodeLocation(device="cuda:0"), Nearness.ELSEWHERE),
        (NodeLocation(rack="r1", device="cuda:0"), Nearness.RACK),
        (NodeLocation(), Nearness.ELSEWHERE),
    ],
)
def test_find_nearness_returns_the_smallest_common_place(there, nearness):
    assert find_nearness(HERE, there) is nearness
    assert find_nearness(there, HERE) is nearness


def test_rank_orders_by_cost_and_gives_reasons():
    nodes = [
        node("far", network="n1", rack="r2"),
        node("full", num_free_blocks=4, host="h1"),
        node("near", num_free_blocks=50, host="h1"),
        node("nearer", num_free_blocks=60, host="h1"),
        node("other", layout=BlockLayout("bytes", 1000, 32), host="h1"),
    ]
    ranking = Topology({Nearness.HOST: Link(1e6, 0.5)}).rank(HERE, 5000, 5, nodes, layout=LAYOUT)
    assert [target.name for target in ranking.targets] == ["far", "nearer", "near"]
    assert ranking.describe().splitlines() == [
        "far: same network, 0.6 GB/s and 2 ms (assumed), 100 blocks free: 2.01 ms",
        "nearer: same host, 0.001 GB/s and 500 ms (given), 60 blocks free: 505 ms",
        "near: same host, 0.001 GB/s and 500 ms (given), 50 blocks free: 505 ms",
        "full: no, 4 of 100 blocks are free, 5 are needed",
        "other: no, its blocks have another layout: block_size is 16 here and 32 there",
    ]
    assert Topology().rank(HERE, 1, 1, []).describe() == "no other node is known"


def test_measured_links_replace_assumed_but_not_given_ones():
    given = Link(5e9, 0.25)
    topology = Topology({Nearness.RACK: given})
    for nearness in (Nearness.RACK, Nearness.HOST):
        topology.note_round_trip(nearness, 0.5)
        topology.note_transfer(nearness, 1_000_000, 1.5)
    assert topology.get_link(Nearness.RACK) == given
    assert topology.get_link(Nearness.HOST) == Link(1e6, 0.5)
    assert topology.get_link(Nearness.DEVICE) == ASSUMED_LINKS[Nearness.DEVICE]
    [target] = topology.rank(HERE, 1_000_000, 1, [node("b", host="h1")]).targets
    assert (target.origin, target.seconds) == ("measured", 1.5)


def test_a_high_latency_does_not_make_bandwidth_infinite():
    topology = Topology()
    topology.note_transfer(Nearness.HOST, 0, 1.0)
    topology.note_transfer(Nearness.HOST, 1000, 0.0)
    topology.note_round_trip(Nearness.HOST, 0.0)
    assert topology.get_link(Nearness.HOST) == ASSUMED_LINKS[Nearness.HOST]
    topology.note_round_trip(Nearness.HOST, 5.0)
    topology.note_transfer(Nearness.HOST, 1000, 1.0)
    assert topology.get_link(Nearness.HOST).bytes_per_s == 2000


@pytest.mark.parametrize("seed", range(20))
def test_random_measurements_equal_their_weighted_means(seed):
    draw = random.Random(seed)
    topology = Topology()
    noted = {nearness: [] for nearness in Nearness}
    for _ in range(60):
        nearness = draw.choice(list(Nearness))
        num_bytes, seconds = draw.randrange(1, 10**9), draw.uniform(0.001, 2.0)
        topology.note_transfer(nearness, num_bytes, seconds)
        noted[nearness].append((num_bytes, seconds))
        weights = [0.8**age for age in range(len(noted[nearness]))]
        latest_first = noted[nearness][::-1]
        expected = sum(w * b for w, (b, _) in zip(weights, latest_first, strict=True)) / sum(
            w * s for w, (_, s) in zip(weights, latest_first, strict=True)
        )
        assert topology.get_link(nearness).bytes_per_s == pytest.approx(expected)
        nodes = [
            node(f"n{number}", draw.randrange(100), host=draw.choice(["h1", "h2"]), rack="r1")
            for number in range(6)
        ]
        ranking = topology.rank(HERE, num_bytes, 50, nodes)
        costs = [target.seconds for target in ranking.targets]
        assert costs == sorted(costs)
        assert {target.name for target in ranking.targets} == {
            other.name for other in nodes if other.num_free_blocks >= 50
        }
        assert len(ranking.targets) + len(ranking.excluded) == 6


def test_peers_and_links_are_read_from_one_file(tmp_path):
    file = tmp_path / "nodes.toml"
    file.write_text(
        '[[peers]]\nname = "b"\naddress = "10.0.0.2:7400"\nrack = "r1"\nhost = "h2"\n'
        '[[peers]]\nname = "c"\naddress = "[::1]:7400"\n'
        "[links.rack]\nbytes_per_s = 40e9\nlatency_s = 5e-5\n"
    )
    assert read_topology(file).get_link(Nearness.RACK) == Link(40e9, 5e-5)
    assert read_peers(file).list_nodes() == [
        KnownNode("b", "10.0.0.2:7400", NodeLocation(rack="r1", host="h2")),
        KnownNode("c", "[::1]:7400"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the nodes: No such file"),
        ("[links", "this is not TOML"),
        ("[links.moon]\n", "unknown field `moon`.*one of device, host, rack, network, elsewhere"),
        ("[links.rack]\nbytes_per_s = 0.0\nlatency_s = 0.0\n", r"Expected `float` > 0.0 - at `\$.links.rack"),
        ("[links.rack]\nbytes_per_s = 1.0\nlatency_s = 0.0\nmood = 1\n", "unknown field `mood`.*links.rack"),
        ('[[peers]]\nname = "b"\n', "missing required field `address`"),
        ('[[peers]]\nname = "b"\naddress = "h:1"\nport = 1\n', "unknown field `port`"),
        ('[[peers]]\nname = "b"\naddress = "h"\n', "peer 'b': 'h' is not a node address"),
        ('[[peers]]\nname = "b"\naddress = "h:1"\n[[peers]]\nname = "b"\naddress = "h:2"\n', "two peers"),
        (
            '[[peer]]\nname = "b"\naddress = "h:1"\n',
            "unknown field `peer`; allowed tables are ",
        ),
    ],
)
def test_an_invalid_file_is_named_in_the_error(tmp_path, content, message):
    file = tmp_path / "nodes.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgumentError, match=message) as error:
        read_peers(file)
    assert str(error.value).startswith(str(file))
