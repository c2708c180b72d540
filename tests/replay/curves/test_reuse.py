"""Tests of the pieces of prompts, against a scan of all blocks."""

import random

import pytest
from replay.curves.made_reuse import ID_BYTES, make_repeating_records, read_prompts, read_reuse
from replay.made_trace import make_random_records, record, write_trace

from kv_pool import TraceError
from kv_pool.replay.curves.reuse import admit
from kv_pool.replay.settings import ReplaySettings

SIZE = 8


def settings_for(tmp_path, records, **more):
    path = write_trace(tmp_path / "trace.jsonl", records)
    return ReplaySettings(str(path), 1, trace_block_size=SIZE, convention="full_blocks", **more)


def list_last_uses(reuse):
    """Return, per request, the last earlier request that used each of its blocks; None for a new block."""
    found = []
    for number in range(len(reuse)):
        last_uses = []
        for index in range(reuse.first_piece[number], reuse.first_piece[number + 1]):
            last_uses += [reuse.owner[index]] * (reuse.end[index] - len(last_uses))
        found.append(last_uses + [None] * (reuse.num_cacheable[number] - len(last_uses)))
    return found


def scan_last_uses(prompts):
    last_use = {}
    found = []
    for number, ids in enumerate(prompts):
        found.append([last_use.get(block) for block in ids])
        last_use.update(dict.fromkeys(ids, number))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_pieces_equal_a_scan_of_all_blocks(tmp_path, seed):
    records = make_random_records(random.Random(seed), 120, SIZE, partial_ids=False)
    reuse = read_reuse(settings_for(tmp_path, records))
    ids = [traced["hash_ids"] for traced in records]
    assert list_last_uses(reuse) == scan_last_uses(ids)
    assert reuse.num_distinct == len({block for prompt in ids for block in prompt})
    assert reuse.largest_request == max(-(-traced["input_length"] // SIZE) for traced in records)


@pytest.mark.parametrize("seed", range(8))
def test_admitted_requests_equal_a_trace_of_only_them(tmp_path, seed):
    records = make_repeating_records(seed, 120, SIZE)
    reuse = read_reuse(settings_for(tmp_path, records))
    for capacity in range(1, 14):
        small = [traced for traced in records if -(-traced["input_length"] // SIZE) <= capacity]
        admitted = admit(reuse, capacity)
        ids = [traced["hash_ids"] for traced in small]
        assert list_last_uses(admitted) == scan_last_uses(ids)
        assert admitted.num_distinct == len({block for prompt in ids for block in prompt})


def test_a_branch_keeps_the_rest_of_the_other(tmp_path):
    records = [
        record(48, [1, 2, 3, 4, 5, 6]),
        record(48, [1, 2, 3, 4, 7, 8]),
        record(56, [1, 2, 3, 4, 5, 6, 9]),
    ]
    reuse = read_reuse(settings_for(tmp_path, records))
    assert list(zip(reuse.owner, reuse.end, strict=True)) == [(0, 4), (1, 4), (0, 6)]


@pytest.mark.parametrize(
    "prompts",
    [[[1, 2, 3], [4, 2, 3]], [[1, 2, 3], [1, 3]], [[1, 1]], [[1, 2], [2, 5]], [[1, 2, 3], [7, 8], [7, 1]]],
    ids=["other parent", "other position", "twice in a prompt", "middle as head", "head in a new tail"],
)
@pytest.mark.parametrize("block_size", [None, 4], ids=["ids", "hashes"])
def test_ids_that_name_no_prefix_are_refused(tmp_path, prompts, block_size):
    records = [record(SIZE * len(ids), ids) for ids in prompts]
    with pytest.raises(TraceError, match="kv-pool sweep replays such a trace"):
        read_reuse(settings_for(tmp_path, records, block_size=block_size))


def test_mixed_kinds_of_ids_are_refused(tmp_path):
    settings = settings_for(tmp_path, [record(16, [1, 2]), {"token_ids": list(range(16))}])
    with pytest.raises(TraceError, match="line 2 has token ids in a trace of hash ids; a curve needs one"):
        read_reuse(settings)


def test_keys_are_the_ids_of_cacheable_blocks(tmp_path):
    records = [record(20, [1, 2, 2**64 - 1])]
    (prompt,), _, key_bytes = read_prompts(settings_for(tmp_path, records))
    assert key_bytes == ID_BYTES
    assert (len(prompt.keys), prompt.num_cacheable, prompt.num_blocks, prompt.max_hit) == (16, 2, 3, 2)
