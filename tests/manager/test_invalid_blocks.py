import random

import pytest
from drawing import ids, state

from kv_pool import BlockHasher, BlockPool, InvalidArgumentError, InvalidBlockError, KVCacheManager, Request
from kv_pool.core import invariants
from kv_pool.manager.block_groups.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.invalid_blocks import report_invalid_blocks

HASHER = BlockHasher("sha256", "s", 4)


def make(num_blocks=12, groups=None):
    return KVCacheManager(BlockPool(num_blocks + 1, True, 4), groups=groups)


def start(manager, name, tokens, num_external=0, **options):
    request = Request(name, tokens, HASHER)
    prefix = manager.get_computed_blocks(request)
    num_new = request.num_tokens - prefix.num_tokens - num_external
    added = manager.allocate_slots(
        request, num_new, prefix, num_external_computed_tokens=num_external, **options
    )
    assert added is not None
    request.num_computed_tokens = request.num_tokens
    return request


def test_blocks_computed_from_a_bad_block_are_evicted_too():
    manager = make()
    start(manager, "a", range(18))
    start(manager, "b", range(50, 60))
    report = manager.report_invalid_blocks({2})
    assert report.num_valid_tokens == {"a": 4}
    assert sorted(ids(report.evicted_blocks)) == [2, 3, 4, 5]
    assert state(manager.block_pool) == "free: 9 10 11 12 | in use: 1* 2 3 4 5 6* 7* 8"


def test_the_request_recomputes_and_caches_its_blocks_again():
    manager = make()
    request = start(manager, "a", range(18))
    request.num_computed_tokens = manager.report_invalid_blocks([3]).num_valid_tokens["a"]
    assert request.num_computed_tokens == 8
    assert manager.allocate_slots(request, 10) is not None
    assert manager.get_block_ids("a") == [1, 2, 3, 4, 5]
    assert state(manager.block_pool) == "free: 6 7 8 9 10 11 12 | in use: 1* 2* 3* 4* 5"


def test_requests_that_share_a_bad_block_recompute_it_separately():
    manager = make()
    first = start(manager, "a", range(12))
    second = start(manager, "b", [*range(8), 90, 91])
    assert manager.get_block_ids("b") == [1, 2, 4]
    report = manager.report_invalid_blocks([2])
    assert report.num_valid_tokens == {"a": 4, "b": 4}
    for request in (first, second):
        request.num_computed_tokens = 4
        assert manager.allocate_slots(request, request.num_tokens - 4) is not None
        request.num_computed_tokens = request.num_tokens
    assert manager.get_block_ids("a")[:1] == manager.get_block_ids("b")[:1] == [1]
    assert not set(manager.get_block_ids("a")[1:]) & set(manager.get_block_ids("b")[1:])
    assert manager.take_block_copies() == []
    manager.free(first)
    manager.free(second)
    invariants.check(manager.block_pool)
    assert manager.get_num_free_blocks() == 12


def test_a_free_cached_block_can_be_bad_too():
    manager = make()
    manager.free(start(manager, "a", range(12)))
    report = manager.report_invalid_blocks([2])
    assert report.num_valid_tokens == {}
    assert manager.get_computed_blocks(Request("b", range(12), HASHER)).num_tokens == 4


def test_groups_of_other_block_sizes_lose_later_tokens():
    manager = make(groups=[FullAttentionSpec(block_size=4), FullAttentionSpec(block_size=8)])
    start(manager, "a", range(17))
    bad = manager.get_block_ids("a", 0)[3]
    report = manager.report_invalid_blocks([bad])
    assert report.num_valid_tokens == {"a": 12}
    evicted = {*manager.get_block_ids("a", 0)[3:], *manager.get_block_ids("a", 1)[1:]}
    assert set(ids(report.evicted_blocks)) == evicted


def test_a_request_continues_only_from_a_complete_window():
    groups = [FullAttentionSpec(block_size=4), SlidingWindowSpec(block_size=4, sliding_window=9)]
    manager = make(16, groups=groups)
    request = start(manager, "a", range(16))
    request.append_output_token_ids([1])
    manager.allocate_slots(request, 1)
    assert manager.get_table("a", 1).num_null_blocks == 2
    bad = manager.get_block_ids("a", 0)
    assert manager.report_invalid_blocks([bad[4]]).num_valid_tokens == {"a": 16}
    assert manager.report_invalid_blocks([bad[3]]).num_valid_tokens == {"a": 0}


def test_a_request_past_the_bad_block_is_named_if_it_shares_more():
    """The request continued with content that had been evicted as bad."""
    groups = [FullAttentionSpec(block_size=8), SlidingWindowSpec(block_size=4, sliding_window=6)]
    manager = make(groups=groups)
    for name, num_tokens in (("a", 17), ("b", 18)):
        request = Request(name, range(num_tokens), HASHER)
        prefix = manager.get_computed_blocks(request)
        assert manager.allocate_slots(request, 16 if name == "a" else 2, prefix) is not None
    assert [manager.get_block_ids(name, 1) for name in ("a", "b")] == [[3, 4, 5, 6], [0, 0, 5, 6, 8]]
    report = manager.report_invalid_blocks([3, 4])
    assert report.num_valid_tokens == {"a": 0, "b": 0}
    assert {1, 2, 5, 6} < set(ids(report.evicted_blocks))


def test_a_request_never_continues_from_a_bad_state():
    manager = make(groups=[FullAttentionSpec(block_size=4), MambaSpec(block_size=4)])
    start(manager, "a", range(9))
    assert manager.report_invalid_blocks([2]).num_valid_tokens == {"a": 0}
    manager = make(groups=[FullAttentionSpec(block_size=4), CrossAttentionSpec(block_size=4)])
    start(manager, "a", range(9), num_encoder_tokens=4)
    assert manager.report_invalid_blocks([2]).num_valid_tokens == {"a": 4}
    (encoder_id,) = manager.get_block_ids("a", 1)
    assert manager.report_invalid_blocks([encoder_id]).num_valid_tokens == {"a": 0}


def test_an_invalid_report_changes_nothing():
    manager = make()
    start(manager, "a", range(12))
    before = state(manager.block_pool)
    for block_id in (0, -1, 13):
        with pytest.raises(InvalidBlockError, match="reported as invalid"):
            manager.report_invalid_blocks([2, block_id])
    with pytest.raises(InvalidArgumentError, match="1 tables; there are 0 groups"):
        report_invalid_blocks(manager.block_pool, {"a": [manager.get_table("a")]}, [], [2])
    assert state(manager.block_pool) == before
    assert manager.get_table("a").num_cached_blocks == 3


@pytest.mark.parametrize("seed", range(100))
def test_random_reports_leave_no_bad_content_to_hit(seed):
    """Random requests over few tokens; the model tracks each block's content by the requests' writes."""
    chance = random.Random(seed)
    manager = make(20)
    running = {}
    for number in range(30):
        if chance.random() < 0.6:
            tokens = [token for _ in range(chance.randint(1, 4)) for token in [chance.randint(0, 1)] * 4]
            request = Request(f"r{number}", [*tokens, 7], HASHER)
            prefix = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is not None:
                request.num_computed_tokens = request.num_tokens
                running[request.request_id] = request
        elif running and chance.random() < 0.5:
            manager.free(running.pop(chance.choice(list(running))))
        elif running:
            held = sorted({block_id for name in running for block_id in manager.get_block_ids(name)})
            bad = set(chance.sample(held, min(len(held), chance.randint(1, 2))))
            tables = {name: manager.get_block_ids(name) for name in running}
            # A request with a block that may be computed from a bad one is in doubt from there on, too.
            doubtful = set(bad)
            for _ in tables:
                expected = {
                    name: 4 * min(place for place, block_id in enumerate(table) if block_id in doubtful)
                    for name, table in tables.items()
                    if doubtful & set(table)
                }
                doubtful |= {one for name in expected for one in tables[name][expected[name] // 4 :]}
            report = manager.report_invalid_blocks(bad)
            assert report.num_valid_tokens == expected
            gone = bad | {block_id for name in expected for block_id in tables[name][expected[name] // 4 :]}
            assert set(ids(report.evicted_blocks)) == gone
            for block_id in gone:
                assert manager.block_pool.blocks[block_id].block_hash is None
            for name, num_valid in expected.items():
                request = running[name]
                request.num_computed_tokens = num_valid
                if manager.allocate_slots(request, request.num_tokens - num_valid) is None:
                    request.num_computed_tokens = 0
                    manager.free(running.pop(name))
                else:
                    request.num_computed_tokens = request.num_tokens
            manager.take_block_copies()
            writers = [
                block_id
                for name in expected
                if name in running
                for block_id in manager.get_block_ids(name)[expected[name] // 4 :]
            ]
            assert len(writers) == len(set(writers))
        invariants.check(manager.block_pool)
    for request in running.values():
        manager.free(request)
    assert manager.get_num_free_blocks() == 20
