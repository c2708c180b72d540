"""Accesses that an event stream tells: those of a real pool, and what the stream cannot tell."""

import json
import random

import pytest
from lab.made_trace import write_trace

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.cli.events import make_event_line
from kv_pool.events.batch import DecodedBatch
from kv_pool.events.stream_items import ReceivedBatch
from kv_pool.lab.formats.event_lines import EventLineReader

HASHER = BlockHasher("sha256", block_size=4)


def stored(ts, hashes, parent=None, **more):
    return {
        "kind": "stored",
        "ts": ts,
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "block_size": 4,
        **more,
    }


def read(tmp_path, lines, **options):
    return [
        (one.arrival_ms / 1000, list(one.hash_ids))
        for one in EventLineReader(write_trace(tmp_path / "events.jsonl", lines), **options)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_accesses_of_a_pool_are_found(tmp_path, seed):
    """Each request of at least one new block gives its full chain of blocks, hits included."""
    rng = random.Random(seed)
    pool = BlockPool(40, True, 4, enable_kv_cache_events=True, dense_events=True)
    manager = KVCacheManager(pool)
    prompts = [[0]]
    lines, expected = [], []
    for number in range(60):
        base = rng.choice(prompts)
        tokens = base[: rng.randrange(len(base) + 1)] + [
            rng.randrange(1000) for _ in range(rng.randrange(1, 25))
        ]
        prompts.append(tokens)
        request = Request(str(number), tokens, HASHER)
        prefix = manager.get_computed_blocks(request)
        is_new = prefix.num_tokens // 4 < len(tokens) // 4
        assert manager.allocate_slots(request, len(tokens) - prefix.num_tokens, prefix) is not None
        manager.free(request)
        ts = 10.0 * number
        batch = ReceivedBatch(number, DecodedBatch(ts, manager.take_events(), 0))
        lines += [make_event_line(batch, event).to_json() for event in batch.batch.events]
        if is_new:
            chain = [int.from_bytes(one[-8:], "big") for one in HASHER.hash_blocks(tokens)]
            expected.append((ts, chain))
    assert any(json.loads(line)["kind"] == "removed" for line in lines)
    assert len(expected) > 30
    assert read(tmp_path, lines) == expected


def test_steps_of_a_request_are_one_access(tmp_path):
    lines = [
        stored(1.0, [1, 2]),
        stored(1.2, [7]),
        stored(1.5, [3], 2),
        stored(2.4, [4], 3),
        stored(9.0, [5], 4),
        stored(9.1, [8], 7),
    ]
    assert read(tmp_path, lines) == [
        (1.0, [1, 2, 3, 4]),
        (1.2, [7]),
        (9.0, [1, 2, 3, 4, 5]),
        (9.1, [7, 8]),
    ]


def test_two_requests_behind_one_block_are_two_accesses(tmp_path):
    lines = [stored(1.0, [1]), stored(1.1, [2], 1), stored(1.2, [3], 1)]
    assert read(tmp_path, lines) == [(1.0, [1, 2]), (1.2, [1, 3])]


def test_blocks_stored_again_are_accessed_again(tmp_path):
    removed = {"kind": "removed", "ts": 2.0, "block_hashes": [1, 2]}
    lines = [stored(1.0, [1, 2]), removed, {"kind": "cleared", "ts": 3.0}, stored(5.0, [1, 2])]
    assert read(tmp_path, lines) == [(1.0, [1, 2]), (5.0, [1, 2])]


def test_other_groups_and_tiers_are_passed_over(tmp_path):
    lines = [
        stored(1.0, [1], group_idx=0, medium="GPU"),
        stored(1.0, [2], group_idx=1),
        stored(1.0, [3], medium="CPU"),
        stored(1.0, [4], medium="cpu"),
        {"kind": "lost", "first": 3, "last": 5, "is_healed": True},
        {"kind": "silent", "seconds": 3.0},
    ]
    assert read(tmp_path, lines) == [(1.0, [1])]


def test_absent_fields_may_be_null(tmp_path):
    lines = [
        stored(None, [1], medium=None, group_idx=None),
        {"kind": "removed", "ts": None, "block_hashes": None},
    ]
    assert read(tmp_path, lines) == [(0.0, [1])]


@pytest.mark.parametrize("medium", ["GPU", "gpu", "Gpu", None])
def test_media_are_compared_in_upper_case(tmp_path, medium):
    assert read(tmp_path, [stored(1.0, [1], medium=medium)]) == [(1.0, [1])]


def test_unrecorded_parents_can_be_skipped(tmp_path):
    lines = [stored(1.0, [2], 1), stored(1.0, [3], 2), stored(2.0, [9])]
    assert read(tmp_path, lines, skip_broken=True) == [(2.0, [9])]


def test_contradicting_parents_make_no_cycle(tmp_path):
    lines = [stored(1.0, [1]), stored(3.0, [2], 1), stored(5.0, [1], 2), stored(7.0, [3], 1)]
    assert read(tmp_path, lines)[-1] == (7.0, [1, 3])


def test_accesses_that_are_over_are_not_kept(tmp_path):
    lines = [stored(float(number), [number], None) for number in range(200)]
    reader = EventLineReader(write_trace(tmp_path / "events.jsonl", lines))
    sizes = [(len(reader._accesses), len(reader._open)) for _ in reader]
    assert max(map(max, sizes)) <= 3
