"""Requests and prefixes migrate to another process and back; every token equals the dense run's."""

import random
from collections import Counter
from contextlib import contextmanager

import pytest
from integrations.transformers.made_model import generate_dense

from kv_pool.migration.secret import write_secret_file

pytestmark = pytest.mark.transformers

NUM_TOKENS = 12
PREFIX = list(range(10, 27))


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("nodes") / "secret"
    write_secret_file(path)
    return str(path)


@contextmanager
def start_nodes(secret_file, here, there):
    """Start a node here and one in another process, which know each other."""
    from integrations.transformers.node import Node, NodeProcess

    nodes = [Node("here", secret_file, **here), NodeProcess("there", secret_file, **there)]
    for node, name, other in zip(nodes, ("there", "here"), nodes[::-1], strict=True):
        node.meet(name, other.get_address())
    yield nodes
    for node in nodes[::-1]:
        node.stop()


@pytest.fixture(scope="module", params=["tcp", pytest.param("nixl", marks=pytest.mark.nixl)])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def pair(secret_file, backend):
    """Shared by all tests that kill neither node: starting a process takes seconds."""
    here = {"backend": backend, "num_blocks": 40}
    there = {"backend": backend, "num_blocks": 30, "tiers": [16, 0, None, "back"]}
    with start_nodes(secret_file, here, there) as nodes:
        yield nodes


@pytest.fixture
def nodes(pair):
    for node in pair:
        node.forget_all()
    return pair


def expect(prompt, num_tokens=NUM_TOKENS):
    return generate_dense(tuple(prompt), num_tokens)


def test_prefix_of_another_process_is_not_recomputed(nodes):
    for source, target, name, first in ((*nodes, "here", 10), (*nodes[::-1], "there", 40)):
        prompt = list(range(first, first + 17))
        source.admit("prompt", prompt)
        source.generate("prompt", 1)
        source.free("prompt")
        assert target.fetch_prefix(name, prompt) == [4, 0]
        assert target.admit("r", prompt) == 16
        assert target.generate("r", NUM_TOKENS) == expect(prompt)
        target.check()
        target.free("r")


@pytest.mark.parametrize("seed", range(6), ids=lambda seed: f"seed{seed}")
def test_random_schedules_on_two_processes_match_the_dense_run(nodes, seed):
    rng = random.Random(seed)
    names = ["here", "there"]
    prompts = {}
    place = {}
    tally = Counter()
    for _ in range(60):
        side = rng.randrange(2)
        here = [name for name in place if place[name] == side]
        match rng.choice(["submit", "submit", "step", "step", "move", "move", "copy", "free"]):
            case "submit":
                name = f"r{len(prompts)}"
                end = [rng.randrange(97) for _ in range(rng.randint(1, 6))]
                prompt = PREFIX[: rng.choice([4, 9, 16])] + end
                if prompts and rng.random() < 0.5:  # its blocks may be cached, or in the tier
                    prompt = rng.choice(list(prompts.values()))
                num_cached_tokens = nodes[side].admit(name, prompt)
                if num_cached_tokens is not None:
                    prompts[name], place[name] = prompt, side
                    tally["cached tokens"] += num_cached_tokens
            case "step" if here:
                name = rng.choice(here)
                generated = nodes[side].generate(name, rng.randint(1, NUM_TOKENS))
                assert generated == expect(prompts[name])[: len(generated)]
                tally["tokens"] += len(generated)
            case "move" if here:
                name = rng.choice(here)
                found = nodes[1 - side].fetch_request(names[side], name)
                if found == "PoolExhaustedError":
                    tally["refused"] += 1
                else:
                    place[name] = 1 - side
                    tally["moved"] += 1
                    tally["blocks there before"] += found[1]
            case "copy":
                prompt = prompts[rng.choice(list(prompts))] if prompts else PREFIX
                found = nodes[1 - side].fetch_prefix(names[side], prompt)
                tally["copied"] += found != "PoolExhaustedError"
            case "free" if here:
                name = rng.choice(here)
                nodes[side].free(name)
                del place[name]
        for where, node in enumerate(nodes):
            assert sorted(node.list_requests()) == sorted(name for name in place if place[name] == where)
            node.check()
    for name, side in place.items():
        generated = nodes[side].generate(name, NUM_TOKENS)
        assert generated == expect(prompts[name])[: len(generated)]
        nodes[side].free(name)
    assert [node.check() for node in nodes] == [0, 0]
    assert set(tally) >= {"cached tokens", "tokens", "moved", "copied", "blocks there before"}
