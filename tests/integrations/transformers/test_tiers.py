"""Tokens equal the dense run's after K and V were in host memory, on disk or in another process."""

import pytest
from integrations.transformers.made_model import (
    check_kv,
    generate_dense,
    make_model,
    make_request,
    make_sequences,
    make_tiers,
    run_step,
)
from integrations.transformers.moved_blocks import crowd_out

from kv_pool.contiguous.invariants import check
from kv_pool.migration.secret import write_secret_file

pytestmark = pytest.mark.transformers

PROMPT = list(range(10, 31))
NUM_TOKENS = 12
TIERS = {"host": (30, 0), "disk": (0, 30), "host and disk": (4, 30)}


def start(sequences, name, prompt, num_tokens=NUM_TOKENS):
    """Admit and generate; return the request, and the number of tokens not computed."""
    request = make_request(name, prompt)
    num_cached_tokens = sequences.admit(request)
    go_on(sequences, request, num_tokens)
    return request, num_cached_tokens


def go_on(sequences, request, num_tokens):
    """Generate up to this many tokens, and compare."""
    while request.num_tokens - request.num_prompt_tokens < num_tokens:
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        run_step(make_model(), sequences, [request], [num_new_tokens])
    prompt = tuple(request.all_token_ids[: request.num_prompt_tokens])
    assert request.all_token_ids[len(prompt) :] == generate_dense(prompt, num_tokens)
    check_kv(sequences, request)
    check(sequences.manager.block_pool)


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("name", TIERS)
def test_request_resumes_from_a_lower_tier(name, write, tmp_path):
    sequences = make_sequences(12, add_tiers=make_tiers(*TIERS[name], tmp_path, write))
    request, _ = start(sequences, "r", PROMPT)
    sequences.free(request)
    crowd_out(sequences)
    assert sequences.manager.get_computed_blocks(request).num_tokens == 0
    # 33 tokens; the last has no K and V yet: 8 full blocks.
    assert sequences.admit(request) == 32
    by_medium = sequences.onboarder.get_statistics().num_tokens_by_medium
    assert by_medium.pop("GPU") == 0
    assert sum(by_medium.values()) == 32
    go_on(sequences, request, NUM_TOKENS + 6)
    sequences.free(request)
    _, num_cached_tokens = start(sequences, "again", PROMPT, NUM_TOKENS + 6)
    assert num_cached_tokens == 20


def test_block_damaged_on_disk_is_recomputed(tmp_path):
    sequences = make_sequences(12, add_tiers=make_tiers(0, 30, tmp_path, "back"))
    request, _ = start(sequences, "r", PROMPT)
    sequences.free(request)
    crowd_out(sequences)
    damage(tmp_path)
    assert sequences.admit(request) == 0
    go_on(sequences, request, NUM_TOKENS + 4)
    sequences.free(request)
    _, num_cached_tokens = start(sequences, "again", PROMPT, NUM_TOKENS + 4)
    assert num_cached_tokens == 20


def damage(folder):
    """Flip a bit in every 256 stored bytes."""
    largest = max((path for path in folder.iterdir()), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        content = bytearray(file.read())
        for position in range(100, len(content), 256):
            content[position] ^= 1
        file.seek(0)
        file.write(content)


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
    go_on(there.sequences, request, NUM_TOKENS + 4)
    for node in (here, there):
        node.stop()
