"""`kv-pool sequences`: tables and JSON of sequences, requests and holds."""

import json
import re

import pytest
from adapter.made_pool import make, take
from cli.kv_pool_command import ask_pool
from control.test_controlled_manager import Served, make_prompt

from kv_pool import BlockPool
from kv_pool.contiguous.run_pool import RunBlockPool


@pytest.fixture
def ask(tmp_path):
    def run(pool, *options, status=0):
        return ask_pool(tmp_path, pool, "sequences", *options, status=status)

    return run


def list_rows(text):
    """Return the cells of each row of a table."""
    return [re.split("  +", line.strip()) for line in text.splitlines() if line.strip(" ─━")]


def test_sequences_show_priority_and_last_access(ask):
    pool = make()
    take(pool, 1, 3)
    take(pool, 2, 2, priority=1)
    titles, first, second = list_rows(ask(pool))
    assert titles == ["sequence", "blocks", "priority", "last used"]
    assert first[:3] == ["1", "3", "0"]
    assert second[:3] == ["2", "2", "1"]
    assert re.fullmatch(r"[\d.]+ s ago", first[3])


@pytest.mark.parametrize("pool_class", [RunBlockPool, BlockPool])
def test_requests_show_tokens_and_held_blocks(ask, pool_class):
    served = Served(pool_class)
    served.engine.start("chat [1]", make_prompt(1, 3))
    served.engine.start("chat 2", make_prompt(2))
    blocks = served.engine.manager.get_table("chat 2").blocks
    with served.engine.pool.hold(blocks, "leased to a test"):
        text = ask(served.face)
    assert list_rows(text) == [
        ["sequence", "blocks", "held in place", "tokens"],
        ["chat [1]", "3", "12"],
        ["chat 2", "2", "2", "8"],
    ]


def test_holds_show_blocks_and_ages(ask):
    pool = make()
    take(pool, 1, 3)
    blocks = pool.block_pool.blocks
    until = pool.block_pool.holds.clock() + 1000
    pool.block_pool.hold(blocks[1:3], "leased to [node b]", until=until)
    pool.pin([3])
    titles, pinned, leased = list_rows(ask(pool, "--holds"))
    assert titles == ["blocks", "ids", "held for", "until", "held as"]
    assert leased[:2] == ["2", "1, 2"]
    assert leased[4] == "leased to [node b]"
    assert re.fullmatch(r"in \d+\.\d s", leased[3])
    assert pinned[:2] == ["1", "3"]  # the pool's hold for pins is as old as the pool
    assert len(list_rows(ask(pool, "--block", "2"))) == 2
    assert ask(pool, "--block", "99", status=2) == "error: block 99 is not one of 1 to 10\n"


def test_json_is_one_object(ask):
    pool = make()
    take(pool, 1, 3)
    with pool.block_pool.hold(pool.block_pool.blocks[1:3], "leased to a test"):
        [report] = json.loads(ask(pool, "--json"))["sequences"]
        assert (report["sequence_id"], report["num_blocks"], report["num_immovable_blocks"]) == (1, 3, 2)
        [hold] = json.loads(ask(pool, "--holds", "--json"))["holds"]
        assert (hold["reason"], hold["num_blocks"], hold["remaining_s"]) == ("leased to a test", 2, None)
