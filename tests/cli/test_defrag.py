"""`kv-pool defrag`: blocks move, and it says what that gave."""

import json
import re

import pytest
from adapter.made_pool import draw, make, make_scattered, take
from cli.kv_pool_command import kv_pool_command

from kv_pool.control import ControlServer


@pytest.fixture
def ask(tmp_path):
    def run(pool, *options):
        with ControlServer(pool, tmp_path / "here.sock"):
            done = kv_pool_command("defrag", "--socket", "here.sock", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

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


def test_people_read_moves_time_and_fragmentation_before_and_after(ask):
    lines = ask(make_scattered(run_length=5)).splitlines()
    assert lines[:2] == ["Defragmentation complete:", "  Moved Blocks: 2"]
    assert re.fullmatch(r"  Time: \d+\.\dms", lines[2])
    assert lines[3:] == ["  Fragmentation Rate: 100.0% → 0.0% (runs of 5)"]


def test_programs_read_one_json_object(ask):
    told = json.loads(ask(make_scattered(run_length=5), "--json"))
    assert told.pop("time_ms") > 0
    assert told == {
        "moved_blocks": 2,
        "fragmentation_rate_before": 1.0,
        "fragmentation_rate_after": 0.0,
        "run_length": 5,
    }


def test_it_moves_no_more_than_it_may(ask):
    assert "Moved Blocks: 1\n" in ask(make_scattered(), "--max-moves", "1")


def test_where_all_that_is_free_is_cached_blocks_change_places(ask):
    pool = make_cached()
    assert draw(pool) == "*2*4*6*8*0"
    assert "Moved Blocks: 6\n" in ask(pool)
    assert sorted(draw(pool)[:5]) == sorted("24680")
    assert draw(pool)[5:] == "*****"
    assert "Nothing moved" not in ask(make_scattered())


def test_where_nothing_moved_it_says_why(ask):
    said = ask(make_cached(), "--max-moves", "1")
    assert "Nothing moved: two blocks that change places are two moves." in said
    pool = make_cached()
    pool.pin([block_id for sequence_id in pool.list_sequences() for block_id in pool.blocks_of(sequence_id)])
    assert "Nothing moved: all is packed, or held." in ask(pool)


def test_cached_blocks_go_where_they_may(ask):
    pool = make_cached()
    assert "Nothing moved" not in ask(pool, "--max-evictions", "5")
    assert pool.get_fragmentation_rate() < 0.5
