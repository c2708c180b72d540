"""`kv-pool defrag`: moves and their report."""

import json
import re

import pytest
from adapter.made_pool import draw, make, make_scattered, take
from cli.kv_pool_command import ask_pool


@pytest.fixture
def ask(tmp_path):
    def run(pool, *options):
        return ask_pool(tmp_path, pool, "defrag", *options)

    return run


def make_cached():
    """*2*4*6*8*0  Every other block is cached, none is empty."""
    pool = make(run_length=2)
    for sequence_id in range(1, 11):
        take(pool, sequence_id, 1)
        pool.cache_prefix(sequence_id, [b"%d" % sequence_id])
    for sequence_id in range(1, 11, 2):
        pool.free_sequence(sequence_id)
    return pool


def test_text_shows_moves_time_and_fragmentation(ask):
    lines = ask(make_scattered(run_length=5)).splitlines()
    assert lines[:2] == ["Defragmentation complete:", "  Moved Blocks: 2"]
    assert re.fullmatch(r"  Time: \d+\.\dms", lines[2])
    assert lines[3:] == ["  Fragmentation Rate: 100.0% → 0.0% (runs of 5)"]


def test_json_is_one_object(ask):
    output = json.loads(ask(make_scattered(run_length=5), "--json"))
    assert output.pop("time_ms") > 0
    assert output == {
        "moved_blocks": 2,
        "fragmentation_rate_before": 1.0,
        "fragmentation_rate_after": 0.0,
        "run_length": 5,
    }


def test_max_moves_is_respected(ask):
    assert "Moved Blocks: 1\n" in ask(make_scattered(), "--max-moves", "1")


def test_blocks_are_exchanged_if_all_free_ones_are_cached(ask):
    pool = make_cached()
    assert draw(pool) == "*2*4*6*8*0"
    assert "Moved Blocks: 6\n" in ask(pool)
    assert sorted(draw(pool)[:5]) == sorted("24680")
    assert draw(pool)[5:] == "*****"
    assert "Nothing moved" not in ask(make_scattered())


def test_no_moves_are_explained(ask):
    said = ask(make_cached(), "--max-moves", "1")
    assert "Nothing moved: exchanging two blocks takes two moves." in said
    pool = make_cached()
    pool.pin([block_id for sequence_id in pool.list_sequences() for block_id in pool.blocks_of(sequence_id)])
    assert "Nothing moved: the blocks are compact, or held in place." in ask(pool)


def test_max_evictions_allows_evicting_cached_blocks(ask):
    pool = make_cached()
    assert "Nothing moved" not in ask(pool, "--max-evictions", "5")
    assert pool.get_fragmentation_rate() < 0.5
