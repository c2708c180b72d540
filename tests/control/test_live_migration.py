"""Running requests of a live replay that migrate to another one, and their bytes."""

import math
import random
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import pytest
from control.live_checks import (
    LAST,
    RATES,
    Clock,
    count_free,
    list_held,
    list_ids,
    make_live,
    make_site,
    run_for,
)
from lab.made_trace import make_random_records, record

from kv_pool import CorruptedPoolError, InvalidArgumentError, PoolExhaustedError
from kv_pool.events.event_publisher import NullEventPublisher
from kv_pool.lab.live.live_replay import STEP_S, _LiveRequest, find_first_number
from kv_pool.migration.backends.in_process import InProcessBackend
from kv_pool.migration.messages import SequenceSubject
from kv_pool.migration.migration_hook import MigrationHook
from kv_pool.migration.migrator import Migrator


class Keeping(NullEventPublisher):
    """A publisher that keeps the events."""

    def __init__(self):
        super().__init__()
        self.events = []

    def publish(self, events):
        self.events += events


class Pair:
    """Two live replays on one clock, each a node."""

    def __init__(self, folder, stack, records, blocks, **settings):
        self.clock = Clock()
        self.replays, self.nodes, self.publishers = {}, {}, {}
        for name in ("a", "b"):
            publisher = self.publishers[name] = Keeping()
            settings |= {"name": name, "blocks": blocks[name], "block_bytes": 64}
            path = folder / f"{name}.jsonl"
            replay = make_live(path, [*records[name], LAST], self.clock, publisher=publisher, **settings)
            site = make_site(replay)
            node = Migrator(name, site, backends=[InProcessBackend(site.storage)])
            self.replays[name], self.nodes[name] = replay, stack.enter_context(node)
        self.nodes["a"].connect(self.nodes["b"])

    def run_for(self, seconds):
        run_for(seconds, self.clock, *self.replays.values())

    def migrate(self, sequence_id, source="a", target="b", is_move=True):
        migration = self.nodes[source].migrate(SequenceSubject(sequence_id), target, is_move=is_move)
        return migration.wait(60)

    def count(self, name):
        progress = self.replays[name].get_progress()
        return progress.num_running, progress.num_finished

    def list_ids(self, name):
        return list(list_held(self.replays[name]))


@pytest.fixture(params=[False, True], ids=["pool", "manager"])
def make_pair(tmp_path, request):
    with ExitStack() as stack:

        def make(records=(), records_of_b=(), blocks=20, blocks_of_b=20, **settings):
            records = {"a": records, "b": records_of_b}
            settings["manager"] = request.param
            return Pair(tmp_path, stack, records, {"a": blocks, "b": blocks_of_b}, **settings)

        yield make


ONE = find_first_number("a")


def test_migrated_request_continues_on_its_new_node(make_pair):
    pair = make_pair([record(20, [1, 2, 3], 50)])
    pair.run_for(2)  # 0.02 s to compute its prompt, then 10 tokens a second
    num_blocks = len(list_ids(pair.replays["a"], ONE))
    assert num_blocks == 5
    assert len(pair.migrate(ONE)) == num_blocks
    assert (pair.count("a"), pair.count("b")) == ((0, 0), (1, 0))
    pair.run_for(2.8)
    assert pair.count("b") == (1, 0)
    pair.run_for(0.5)
    assert pair.count("b") == (0, 1)
    assert pair.replays["a"].get_progress().num_moved_out == 1
    assert pair.replays["b"].get_progress().num_moved_in == 1
    assert count_free(pair.replays["b"]) == 20


def test_request_migrates_before_its_prompt_is_computed(make_pair):
    pair = make_pair([record(20, [1, 2, 3], 10)], rates=replace(RATES, prefill_tokens_per_s=10.0))  # 2 s
    pair.run_for(1)
    num_blocks = len(pair.migrate(ONE))
    pair.run_for(0.8)
    assert len(list_ids(pair.replays["b"], ONE)) == num_blocks
    pair.run_for(0.8)
    assert len(list_ids(pair.replays["b"], ONE)) > num_blocks
    pair.run_for(1)
    assert (pair.count("a"), pair.count("b")) == ((0, 0), (0, 1))


def test_requests_move_while_too_few_blocks_are_free_and_finish(make_pair):
    pair = make_pair([record(20, [1, 2, 3], 50), record(20, [4, 5, 6], 50)])
    pair.run_for(2)
    hook = MigrationHook()
    hook.use(pair.replays["a"].pool, pair.nodes["a"])
    num_free = count_free(pair.replays["a"])
    assert hook.keep_free(num_free) == 0
    assert hook.keep_free(num_free + 1) == 1
    assert (pair.count("a"), pair.count("b")) == ((1, 0), (1, 0))
    pair.run_for(4)
    assert (pair.count("a"), pair.count("b")) == ((0, 1), (0, 1))


def test_suspended_request_generates_nothing(make_pair):
    pair = make_pair([record(8, [1], 100)])
    pair.run_for(1.0)
    site = pair.nodes["a"].site
    held = list_ids(pair.replays["a"], ONE)
    with site.lock:
        site.freeze(SequenceSubject(ONE), site.select(SequenceSubject(ONE), True).rows)
    pair.run_for(3.0)
    with site.lock:
        site.thaw(SequenceSubject(ONE))
    assert list_ids(pair.replays["a"], ONE) == held
    pair.run_for(0.4)
    assert len(list_ids(pair.replays["a"], ONE)) <= len(held) + 1
    pair.run_for(2.0)
    assert len(list_ids(pair.replays["a"], ONE)) > len(held)


def test_migrated_blocks_are_published_with_tokens_and_hit(make_pair):
    pair = make_pair([record(24, [1, 2, 3], 20)], [record(24, [1, 2, 3], 20, 5000)])
    pair.run_for(1.0)
    pair.migrate(ONE)
    came = list_ids(pair.replays["b"], ONE)
    pair.run_for(5.0)
    stored = [event.token_ids for event in pair.publishers["b"].events if hasattr(event, "token_ids")]
    assert stored[:3] == [[1] * 8, [2] * 8, [3] * 8]
    assert list_ids(pair.replays["b"], find_first_number("b"))[:2] == came[:2]


def test_wrong_bytes_are_detected(make_pair):
    pair = make_pair([record(24, [1, 2, 3], 20)])
    pair.run_for(0.5)
    storage = pair.nodes["a"].site.storage
    block_id = list_ids(pair.replays["a"], ONE)[1]
    storage.write_block(block_id, bytes(storage.block_bytes))
    new_ids = pair.migrate(ONE)
    with pytest.raises(
        CorruptedPoolError, match=rf"the bytes of blocks \[{new_ids[1]}\] do not match their hashes"
    ):
        pair.replays["b"].step()


def test_request_that_the_target_cannot_continue_stays(make_pair):
    pair = make_pair([record(16, [1, 2], 60), record(16, [4, 5], 3)], blocks_of_b=8)
    pair.run_for(0.2)
    with pytest.raises(InvalidArgumentError, match=f"sequence {ONE} will need 10 blocks, the pool has 8"):
        pair.migrate(ONE)
    there = pair.replays["b"]
    state = pair.replays["a"].describe(ONE + 1)
    for sequence_id, num_blocks, said in (
        (ONE + 1, 2, b"nonsense"),
        (ONE + 1, 2, msgspec.msgpack.encode([1, 2])),
        (ONE, 2, state),
        (ONE + 1, 1, state),
    ):
        with pytest.raises(InvalidArgumentError):
            there.expect(sequence_id, num_blocks, said)
    fields = msgspec.msgpack.decode(state)
    names = list(_LiveRequest.__struct_fields__)
    for num_fields in range(len(fields)):
        with pytest.raises(InvalidArgumentError, match=r"fields|state of a live replay"):
            there.expect(ONE + 1, 3, msgspec.msgpack.encode(fields[:num_fields]))
    for name, value in (
        ("prompt_ids", [4]),
        ("tokens_per_id", 2**62),
        ("block_hashes", fields[names.index("block_hashes")][:1]),
        ("num_prompt_tokens", 18),
        ("num_generated", 2),
        ("num_generated", -1),
        ("computed_s", math.nan),
    ):
        wrong = list(fields)
        wrong[names.index(name)] = value
        with pytest.raises(InvalidArgumentError, match=r"contradicts itself|ids of blocks"):
            there.expect(ONE + 1, 3, msgspec.msgpack.encode(wrong))
    there.expect(ONE + 1, 3, state)
    there._waiting.append(pair.replays["a"]._running[str(ONE + 1)])
    with pytest.raises(InvalidArgumentError, match="is here already: it waits for blocks"):
        pair.migrate(ONE + 1)
    there._waiting.clear()
    pair.run_for(10)
    assert pair.count("a") == (0, 2)


def test_nodes_with_different_names_have_different_request_ids():
    names = [f"node-{number}" for number in range(20)]
    numbers = {find_first_number(name) for name in names}
    assert len(numbers) == 20
    assert all(number % 1_000_000 == 1 and number > 1_000_000 for number in numbers)


@pytest.mark.parametrize("seed", range(6))
def test_random_migrations_finish_each_request_once_and_intact(make_pair, seed):
    draw = random.Random(seed)
    records = {}
    for name in ("a", "b"):
        made = make_random_records(draw, 25, 8, partial_ids=True)
        records[name] = [{**one, "timestamp": 100 * at, "output_length": 30} for at, one in enumerate(made)]
    most = max(-(-(one["input_length"] + 30) // 8) for found in records.values() for one in found)
    size = most + 12
    more = {"host_tier": 8} if seed % 2 else {}
    pair = make_pair(records["a"], records["b"], size, size, defrag_threshold=0.05, defrag_interval=0, **more)
    num_moved = 0
    for _ in range(60):
        pair.run_for(draw.choice([1, 3]) * STEP_S)
        source, target = draw.sample(["a", "b"], 2)
        running = pair.list_ids(source)
        if running:
            try:
                pair.migrate(draw.choice(running), source, target)
                num_moved += 1
            except (PoolExhaustedError, InvalidArgumentError):
                pass  # too few free blocks, or the request waits there
    pair.run_for(60)
    assert num_moved > 5
    assert sum(pair.count(name)[1] for name in ("a", "b")) == 50
    for name in ("a", "b"):
        assert pair.count(name)[0] == 0
        pair.nodes[name].check_invariants()
