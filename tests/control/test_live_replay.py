"""A live replay on a test clock: allocation, generation, eviction, compaction, events."""

import random
import threading
from itertools import islice

import pytest
from control.live_checks import LAST, RATES, Clock, count_free, list_held, make_live, run_for
from events.pool_map import pool_map
from lab.made_trace import make_random_records, record, write_trace

from kv_pool import GPUKVPool, InvalidArgumentError
from kv_pool.control.serve_settings import ServeSettings
from kv_pool.events.event_publisher import NullEventPublisher
from kv_pool.events.mirror import PrefixMirror
from kv_pool.events.stream_state import StreamState
from kv_pool.lab.live.live_replay import STEP_S, LiveReplay, repeat_requests
from kv_pool.lab.trace import Trace
from kv_pool.reports.layout import BlockState


@pytest.fixture(params=[False, True], ids=["pool", "manager"])
def make_replay(tmp_path, request):
    def make(records, rates=RATES, publisher=None, **settings):
        clock = Clock()
        settings = {"run_length": 2, "manager": request.param, **settings}
        path = tmp_path / "trace.jsonl"
        replay = make_live(path, records, clock, rates=rates, publisher=publisher, **settings)
        replay.run_for = lambda seconds: run_for(seconds, clock, replay)
        return replay

    return make


def count(replay):
    progress = replay.get_progress()
    return progress.num_waiting, progress.num_running, progress.num_finished


class Mirroring(NullEventPublisher):
    """A publisher that keeps the blocks that a subscriber of an exact stream would know."""

    def __init__(self):
        super().__init__()
        self.state = StreamState()
        self.mirror = PrefixMirror(learns_tokens=True)
        self.mirror.add_publisher("here")

    def publish(self, events):
        self.mirror.apply("here", self.state.apply(events))


def test_request_allocates_grows_and_releases_its_blocks(make_replay):
    replay = make_replay([record(16, [1, 2], 20), LAST], blocks=10)
    replay.run_for(STEP_S)
    assert count(replay) == (0, 1, 0)
    assert list_held(replay) == {1: 2}
    replay.run_for(1.2)  # 16 tokens at 1000 a second, then 10 a second: 11 of 20
    assert list_held(replay) == {1: 4}
    replay.run_for(1.0)
    assert count(replay) == (0, 0, 1)
    assert count_free(replay) == 10


def test_repeated_prompt_is_hit_except_for_its_last_token(make_replay):
    replay = make_replay([record(16, [1, 2], 1, 0), record(16, [1, 2], 1, 1000), LAST], blocks=10)
    replay.run_for(0.9)
    assert count(replay) == (0, 0, 1)
    cached = {
        block_id
        for block_id, state in enumerate(replay.pool.get_layout().states)
        if state == BlockState.CACHED
    }
    replay.run_for(0.15)
    layout = replay.pool.get_layout()
    assert list_held(replay) == {2: 2}
    # The first block is the first request's. Its second block stays cached beside the new one.
    first, second = [block_id for block_id, holders in enumerate(layout.holders) if holders]
    assert len(cached) == 2
    assert len(cached & {first, second}) == 1
    assert cached - {first, second} == {
        block_id for block_id, state in enumerate(layout.states) if state == BlockState.CACHED
    }


def test_growing_request_evicts_another_which_restarts(make_replay):
    records = [record(24, [1, 2, 3], 30), record(16, [4, 5], 30)]
    replay = make_replay([*records, LAST], blocks=7)
    replay.run_for(3)
    assert replay.get_progress().num_preempted > 0
    if isinstance(replay.pool, GPUKVPool):
        assert replay.pool.get_statistics().evicted_sequences == replay.get_progress().num_preempted
    replay.run_for(20)
    assert count(replay) == (0, 0, 2)


def test_repeated_trace_has_new_request_ids(make_replay):
    replay = make_replay([record(16, [1, 2], 1, 0), record(8, [3], 1, 500)], blocks=10)
    replay.run_for(4.45)  # rounds begin at 0, 1.5 and 3
    assert count(replay) == (0, 0, 6)


def test_requests_without_timestamps_do_not_pile_up(make_replay):
    replay = make_replay([record(16, [1, 2], 1)] * 300, blocks=10)
    replay.run_for(0.5)
    waiting, running, finished = count(replay)
    assert waiting + running + finished < 300
    assert waiting >= 250
    assert finished > 0


def test_scattered_blocks_are_compacted_within_a_budget(make_replay):
    records = [record(8, [at], 5 if at % 2 else 60) for at in range(1, 11)]
    replay = make_replay([*records, LAST], blocks=20, defrag_threshold=0.0, defrag_moves=1, defrag_interval=0)
    replay.run_for(2.5)
    statistics = replay.pool.get_statistics()
    assert statistics.moved_blocks > 1
    assert statistics.moved_blocks == statistics.epoch == replay.defragmenter.num_moves


def test_run_continues_until_stop_is_set(tmp_path):
    path = write_trace(tmp_path / "trace.jsonl", [record(16, [1, 2], 1)])
    replay = LiveReplay(ServeSettings(trace=str(path), blocks=10, block_size=8, trace_block_size=8))
    stop = threading.Event()
    thread = threading.Thread(target=replay.run, args=(stop,))
    thread.start()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_trace_without_fitting_requests_is_an_error(tmp_path):
    path = write_trace(
        tmp_path / "trace.jsonl", [record(80, list(range(10)), 1), record(90, list(range(12)), 1)]
    )
    with pytest.raises(InvalidArgumentError, match="has 5 blocks of 8 tokens, the smallest request needs 11"):
        LiveReplay(ServeSettings(trace=str(path), blocks=5, block_size=8, trace_block_size=8))


def test_endless_requests_have_unique_ids_and_arrive_in_order(tmp_path):
    path = write_trace(
        tmp_path / "trace.jsonl", [record(16, [1, 2], 1, 0), record(8, [3], 1, 20), record(8, [3])]
    )
    requests = list(islice(repeat_requests(Trace(path, block_size=8), 8, 10), 7))
    assert [request.request_id for request in requests] == ["1", "2", "3", "4", "5", "6", "7"]
    assert [request.arrival_ms for request in requests] == [0, 20, 20, 1020, 1040, 1040, 2040]
    assert requests[3].block_hashes == requests[0].block_hashes


@pytest.mark.parametrize("seed", range(3))
def test_events_match_the_cached_blocks_after_each_step(make_replay, seed):
    records = make_random_records(random.Random(seed), 60, 8, partial_ids=True)
    publisher = Mirroring()
    replay = make_replay(records, publisher=publisher, blocks=24, defrag_threshold=0.05, defrag_interval=0)
    published = set()
    for _ in range(200):
        replay.run_for(STEP_S)
        held = publisher.mirror.get_blocks("here")
        assert held == pool_map(replay.pool.block_pool)
        published |= held
    assert replay.pool.get_statistics().evicted_blocks > 0
    assert replay.pool.get_statistics().moved_blocks > 0
    assert len(published) > 24


def test_without_a_publisher_no_events_are_queued(make_replay):
    replay = make_replay([record(16, [1, 2], 20), LAST], blocks=10)
    replay.run_for(1.0)
    assert not replay.pool.block_pool.kv_event_queue
