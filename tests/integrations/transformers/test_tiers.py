"""Tokens equal the dense run's after K and V were in host memory, on disk or in another process."""

import pytest
from integrations.transformers.made_model import (
    generate,
    generate_dense,
    make_request,
    make_sequences,
    make_tiers,
)
from integrations.transformers.moved_blocks import crowd_out

from kv_pool.migration.secret import write_secret_file

pytestmark = pytest.mark.transformers

PROMPT = list(range(10, 31))
NUM_TOKENS = 12


def start(sequences, name, prompt, num_tokens=NUM_TOKENS):
    """Admit and generate; return the request, and the number of tokens not computed."""
    request = make_request(name, prompt)
    num_cached_tokens = sequences.admit(request)
    generate(sequences, request, num_tokens)
    return request, num_cached_tokens


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_folder_can_be_opened_by_another_process(ending, tmp_path):
    """The writing process has closed the folder, or was killed."""
    from integrations.transformers.node import NodeProcess

    write_secret_file(tmp_path / "secret")
    folder = tmp_path / "tier"
    node = NodeProcess("writer", str(tmp_path / "secret"), num_blocks=12, tiers=[0, 30, str(folder), "back"])
    node.admit("r", PROMPT)
    assert node.generate("r", NUM_TOKENS) == generate_dense(tuple(PROMPT), NUM_TOKENS)
    node.free("r")
    node.crowd_out()
    getattr(node, ending)()
    sequences = make_sequences(12, "BLNHC", add_tiers=make_tiers(0, 30, folder, "back"))
    assert sequences.tiers.tiers[0].reopened.num_dropped == 0
    request, num_cached_tokens = start(sequences, "r", PROMPT, NUM_TOKENS)
    assert num_cached_tokens == 20
    sequences.free(request)
    sequences.manager.reset_prefix_cache()


def test_blocks_evicted_by_an_arriving_request_are_in_the_tiers(tmp_path):
    from integrations.transformers.node import Node

    secret_file = str(tmp_path / "secret")
    write_secret_file(secret_file)
    here = Node("here", secret_file)
    there = Node("there", secret_file, num_blocks=12, tiers=(30, 0, None, "back"))
    there.meet("here", here.get_address())
    request, _ = start(there.sequences, "r", PROMPT)
    there.sequences.free(request)
    here.admit("guest", range(40, 75))
    here.generate("guest", 4)
    assert there.fetch_request("here", "guest") == [10, 0]
    there.generate("guest", NUM_TOKENS - 6)
    there.free("guest")
    crowd_out(there.sequences)
    assert there.sequences.admit(request) == 32
    generate(there.sequences, request, NUM_TOKENS + 4)
    for node in (here, there):
        node.stop()
