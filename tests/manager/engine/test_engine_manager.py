"""`EngineManager` beside a `KVCacheManager` that is called without its shortcuts; and what it tolerates."""

import random

import pytest

from kv_pool import BlockHasher, BlockPool, KVCacheManager, Request
from kv_pool.errors import PoolInterruptedError
from kv_pool.manager import invariants
from kv_pool.manager.block_groups.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from kv_pool.manager.engine.engine_manager import EngineManager
from kv_pool.manager.prefix_rules import PrefixRules

FULL = FullAttentionSpec(block_size=4)
GROUPS = {
    "full": [FULL],
    "window": [SlidingWindowSpec(block_size=4, sliding_window=9)],
    "full and window": [FULL, SlidingWindowSpec(block_size=4, sliding_window=9)],
    "full and chunks": [FULL, ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8)],
    "full and states": [FULL, MambaSpec(block_size=4)],
    "drafted states": [FULL, MambaSpec(block_size=4, num_speculative_blocks=2)],
}
HASHER = BlockHasher("sha256", block_size=4)


class EngineRequest(Request):
    """A request with what a scheduler of vLLM adds."""

    def __init__(self, request_id, token_ids, hasher=HASHER):
        super().__init__(request_id, token_ids, hasher)
        self.num_in_flight_tokens = 0
        self.shared_prefix_boundary = 0
        self.skip_reading_prefix_cache = False
        self.status = "waiting"


def make_manager(groups, num_blocks=60, **options):
    pool = BlockPool(num_blocks, True, 4, enable_kv_cache_events=True)
    return KVCacheManager(
        pool, groups=GROUPS[groups], max_model_len=200, prefix_rules=PrefixRules(), **options
    )


def make_engine(groups="full", num_blocks=60, **options):
    manager = make_manager(groups, num_blocks, **options)
    return EngineManager(
        manager,
        event_labels=[(spec.kind, getattr(spec, "sliding_window", None)) for spec in manager.groups],
        waiting_statuses=["waiting"],
        zeroed_groups=[0],
    )


def picture(manager):
    """Return the tables, the free queue and the events."""
    tables = {
        name: [manager.get_block_ids(name, group) for group in range(len(manager.groups))]
        for name in manager.list_request_ids()
    }
    free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
    return tables, free


class Pair:
    """The same requests under an engine's manager and under a manager without shortcuts."""

    def __init__(self, groups, rng):
        self.engine = make_engine(groups)
        self.manager = make_manager(groups)
        self.rng = rng
        self.running = {}
        self.num_quiet = 0

    def admit(self, name):
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 60))]
        pair = [EngineRequest(name, tokens) for _ in range(2)]
        blocks, num_hits, junction = self.engine.get_computed_blocks(pair[0])
        prefix = self.manager.get_computed_blocks(pair[1])
        assert (num_hits, junction) == (prefix.num_tokens, prefix.junction)
        pair[0].shared_prefix_boundary = junction
        num_new = self.rng.randrange(1, len(tokens) - num_hits + 1)
        added = self.engine.allocate_slots(pair[0], num_new, num_hits, blocks)
        expected = self.manager.allocate_slots(pair[1], num_new, prefix)
        self.compare(added, expected)
        if expected is not None:
            self.running[name] = pair
            for request in pair:
                request.num_computed_tokens = num_hits + num_new
                request.status = "running"

    def step(self, name):
        pair = self.running[name]
        num_left = pair[0].num_tokens - pair[0].num_computed_tokens
        if not num_left:
            token = self.rng.randrange(2)
            for request in pair:
                request.append_output_token_ids([token])
            num_left = 1
        num_new = min(num_left, self.rng.randrange(1, 20))
        num_lookahead = self.rng.choice([0, 0, 2])
        num_in_flight = self.rng.choice([0, 0, min(3, pair[0].num_computed_tokens)])
        pair[0].num_in_flight_tokens = num_in_flight
        added = self.engine.allocate_slots(pair[0], num_new, num_lookahead_tokens=num_lookahead)
        expected = self.manager.allocate_slots(
            pair[1], num_new, num_lookahead_tokens=num_lookahead, num_in_flight_tokens=num_in_flight
        )
        self.compare(added, expected)
        self.num_quiet += added is self.engine.empty_kv_cache_blocks
        if expected is None:
            self.free(name)
            return
        for request in pair:
            request.num_computed_tokens += num_new

    def compare(self, added, expected):
        if expected is None:
            assert added is None
        else:
            ids = tuple([block.block_id for block in group] for group in expected)
            assert added.get_block_ids() == ids
            assert added.get_block_ids(allow_none=True) == (ids if any(ids) else None)

    def free(self, name):
        pair = self.running.pop(name)
        if self.rng.random() < 0.5:
            self.engine.free(pair[0])
            self.manager.free(pair[1])
            return
        # As with a deferred free; the groups' blocks are then freed in one call.
        self.engine.block_pool.free_blocks(reversed(self.engine.pop_blocks_for_free(pair[0])))
        tables = self.manager.pop_tables(name)
        blocks = [block for table in tables for block in table.blocks[table.num_null_blocks :]]
        self.manager.free_blocks(blocks[::-1])

    def run(self):
        for number in range(150):
            if self.rng.random() < 0.3 and len(self.running) < 5:
                self.admit(f"r{number}")
            for name in list(self.running):
                self.step(name)
                if name in self.running and self.rng.random() < 0.06:
                    self.free(name)
            self.engine.new_step_starts()
            self.manager.begin_step()
            assert picture(self.engine.manager) == picture(self.manager)
            assert len(self.engine.take_events()) == len(self.manager.take_events())
            requests = [pair[0] for pair in self.running.values()]
            invariants.check_references(self.engine.manager)
            for request in requests:
                assert self.engine.get_block_ids(request.request_id) == tuple(
                    picture(self.manager)[0][request.request_id]
                )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", GROUPS)
def test_engine_takes_the_same_blocks_as_a_manager(groups, seed):
    pair = Pair(groups, random.Random(seed))
    pair.run()
    assert pair.num_quiet > 20


def test_quiet_step_returns_the_shared_empty_result():
    engine = make_engine()
    request = EngineRequest("r", range(6))
    assert engine.allocate_slots(request, 6).get_block_ids() == ([1, 2],)
    request.num_computed_tokens = 6
    assert engine.allocate_slots(request, 1) is engine.empty_kv_cache_blocks
    assert engine.empty_kv_cache_blocks.get_block_ids(allow_none=True) is None


def test_unknown_requests_have_no_blocks():
    engine = make_engine()
    request = EngineRequest("r", range(6))
    engine.free(request)
    engine.cache_blocks(request, 4)
    engine.remove_skipped_blocks("r", 4)
    assert engine.pop_blocks_for_free(request) == []
    assert engine.get_blocks("r") is engine.empty_kv_cache_blocks
    assert engine.get_block_ids("r") == ([],)
    assert engine.estimate_cached_tokens(request) == 0


@pytest.mark.parametrize("groups", list(GROUPS))
def test_blocks_that_were_read_follow_the_request(groups):
    engine = make_engine(groups)
    request = EngineRequest("r", range(60))
    engine.allocate_slots(request, 7)
    blocks = engine.get_blocks("r")
    request.num_computed_tokens = 7
    for num_new in (9, 1, 25, 18):
        engine.allocate_slots(request, num_new)
        request.num_computed_tokens += num_new
        assert blocks.get_block_ids() == engine.get_block_ids("r")


@pytest.mark.parametrize("call", ["cache_blocks", "allocate_slots"])
def test_end_of_a_prompt_is_cached_when_a_step_makes_it_final(call):
    """A drafter may compute 2 tokens again; the step with 3 accepted drafts leaves them behind at once."""
    groups = [FullAttentionSpec(block_size=8), MambaSpec(block_size=8)]
    manager = KVCacheManager(
        BlockPool(20, True, 1),
        groups=groups,
        prefix_rules=PrefixRules(eagle_groups=[0], num_reprefillable_tokens=2),
    )
    engine = EngineManager(manager, event_labels=[(spec.kind, None) for spec in groups])
    hasher = BlockHasher("sha256", block_size=1)
    first, second = EngineRequest("first", range(9), hasher), EngineRequest("second", range(12), hasher)
    for num_new in (8, 1, 4):
        if num_new == 4:
            first.append_output_token_ids([20])
        engine.new_step_starts()
        engine.allocate_slots(first, num_new)
        engine.take_kv_cache_block_copies()
        first.num_computed_tokens += num_new
    first.append_output_token_ids([21, 22, 23])
    assert engine.get_computed_blocks(second)[1] == 0
    if call == "cache_blocks":
        engine.cache_blocks(first, 13)
    else:
        engine.allocate_slots(first, 1)
    assert engine.get_computed_blocks(second)[1] == 8


@pytest.mark.parametrize("sequence_must_fit", [False, True])
@pytest.mark.parametrize(("watermark", "is_admitted"), [(0.4, True), (0.5, False)])
def test_states_of_rejected_drafts_count_against_the_watermark(watermark, is_admitted, sequence_must_fit):
    """3 of 10 blocks are free; the request has one state more than it needs, which vLLM counts as -1."""
    engine = make_engine("drafted states", num_blocks=10, watermark=watermark)
    request = EngineRequest("r", range(6))
    assert engine.allocate_slots(request, 9, has_scheduled_reqs=False).get_block_ids()[1] == [0, 0, 4, 5, 6]
    request.num_computed_tokens = 5
    added = engine.allocate_slots(request, 1, full_sequence_must_fit=sequence_must_fit)
    assert (added is not None) == is_admitted


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(10, True), (9, False)])
def test_a_hit_without_its_state_takes_no_block_for_the_state(num_blocks, is_admitted):
    """2 blocks of attention, a state after the external tokens and one after the step are new.

    The hit was cut within the blocks that another request holds; its last state is the null block.
    """
    engine = make_engine("full and states", num_blocks=num_blocks)
    first, second = (EngineRequest(name, range(16)) for name in ("first", "second"))
    for num_new in (8, 4):
        engine.new_step_starts()
        engine.allocate_slots(first, num_new)
        first.num_computed_tokens += num_new
    hits, num_tokens, _ = engine.get_computed_blocks(second)
    assert num_tokens == 12
    hits = engine.truncate_computed_blocks(hits, 8)
    assert hits.get_block_ids() == ([1, 2], [0, 0])
    engine.new_step_starts()
    added = engine.allocate_slots(second, 1, 8, hits, num_external_computed_tokens=4, delay_cache_blocks=True)
    assert (added is not None) == is_admitted


@pytest.mark.parametrize("groups", list(GROUPS))
@pytest.mark.parametrize("num_hashes", [0, 1, 2])
def test_blocks_with_a_hash_are_cached_before_ones_without(groups, num_hashes):
    engine, complete = make_engine(groups), make_engine(groups)
    request = EngineRequest("r", range(17))
    request.block_hashes[num_hashes:] = []
    for other, tokens in ((engine, request), (complete, EngineRequest("r", range(17)))):
        for num_new in (8, 4, 5):
            assert other.allocate_slots(tokens, num_new) is not None
            tokens.num_computed_tokens += num_new
            other.cache_blocks(tokens, tokens.num_computed_tokens)
            other.new_step_starts()
    for group, table in enumerate(engine.get_blocks("r").blocks):
        expected = [block.block_hash for block in complete.get_blocks("r").blocks[group]][:num_hashes]
        assert [block.block_hash for block in table] == expected + [None] * (len(table) - num_hashes)


def test_external_blocks_after_a_partial_hit_are_zeroed():
    groups = [FullAttentionSpec(block_size=8), MambaSpec(block_size=8)]
    manager = KVCacheManager(BlockPool(60, True, 4), groups=groups, prefix_rules=PrefixRules())
    engine = EngineManager(manager, event_labels=[("full", None), ("mamba", None)], zeroed_groups=[0])
    first, second = EngineRequest("first", range(13)), EngineRequest("second", range(41))
    for num_new in (12, 1):
        engine.new_step_starts()
        engine.allocate_slots(first, num_new)
        first.num_computed_tokens += num_new
    engine.new_step_starts()
    engine.take_new_block_ids()
    hits, num_tokens, _ = engine.get_computed_blocks(second)
    assert num_tokens == 12
    engine.allocate_slots(
        second, 1, num_tokens, hits, num_external_computed_tokens=20, delay_cache_blocks=True
    )
    assert set(engine.get_block_ids("second")[0][1:]) <= set(engine.take_new_block_ids())


def test_an_interrupted_pool_refuses_each_call():
    engine = make_engine()
    request = EngineRequest("r", range(10))
    engine.allocate_slots(request, 10)
    engine.block_pool.is_changing = True
    for call in (
        lambda: engine.allocate_slots(request, 1),
        lambda: engine.cache_blocks(request, 8),
        lambda: engine.evict_blocks([1]),
        lambda: engine.pop_blocks_for_free(request),
        lambda: engine.free(request),
    ):
        with pytest.raises(PoolInterruptedError):
            call()
        assert engine.block_pool.is_changing
