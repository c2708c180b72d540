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


@pytest.mark.parametrize("is_from_here", [True, False], ids=["here to there", "there to here"])
def test_prefix_of_another_process_is_not_recomputed(nodes, is_from_here):
    source, target = nodes if is_from_here else nodes[::-1]
    known = 0
    for number, length in enumerate((0, 3, 4, 9)):
        prompt = [*PREFIX[:17], *range(50 + 10 * number, 50 + 10 * number + length)]
        source.admit("prompt", prompt)
        assert source.generate("prompt", 1) == expect(prompt, 1)
        source.free("prompt")
        num_full = len(prompt) // 4
        assert target.fetch_prefix("here" if is_from_here else "there", prompt) == [num_full, known]
        # The last block of a prompt of full blocks is recomputed: the logits of its last token are needed.
        assert target.admit(f"r{number}", prompt) == (len(prompt) - 1) // 4 * 4
        known = 4
    for number, length in enumerate((0, 3, 4, 9)):
        prompt = [*PREFIX[:17], *range(50 + 10 * number, 50 + 10 * number + length)]
        assert target.generate(f"r{number}", NUM_TOKENS) == expect(prompt)
    target.check()
    assert source.check() == 0


@pytest.mark.parametrize("num_generated", [1, 5])
def test_request_continues_in_another_process(nodes, num_generated):
    """The last block may be partly filled or full, or the next one may have one token."""
    here, there = nodes
    here.admit("r", PREFIX)
    here.generate("r", num_generated)
    num_blocks = -(-(len(PREFIX) + num_generated - 1) // 4)
    assert there.fetch_request("here", "r") == [num_blocks, 0]
    assert here.list_requests() == []
    assert here.check() == 0
    assert there.list_requests() == ["r"]
    assert there.generate("r", NUM_TOKENS) == expect(PREFIX)
    there.check()


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
