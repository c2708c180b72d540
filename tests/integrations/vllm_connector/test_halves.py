"""The two halves together: which blocks are held, and what a failure leaves behind."""

import threading

import pytest
from integrations.vllm_connector.made_halves import BLOCK_SIZE, TIMEOUT_S, Halves, make_content
from made_threads import no_new_threads

from kv_pool.errors import CopyFailedError, TierError
from kv_pool.integrations.vllm.connector.tier_index import StepOrders, StoreOrder, WorkerReport


@pytest.fixture
def make_halves(tmp_path):
    made = []

    def make(*windows, **options):
        made.append(Halves(tmp_path / str(len(made)), windows or (None,), **options))
        return made[-1]

    yield make
    for halves in made:
        halves.close()


def hashes(name, num_blocks):
    return [f"{name}{number}".encode() for number in range(num_blocks)]


def start(halves, name, num_blocks, num_computed=None):
    """Return a new request of which some blocks are computed, by default all."""
    request = halves.make_request(name, hashes(name, num_blocks))
    halves.admit(request)
    halves.compute(request, num_blocks if num_computed is None else num_computed)
    return request


def run(halves, name, num_blocks, prefix=None):
    """Run a request to its end; return its tokens from tiers."""
    request = halves.make_request(name, hashes(prefix or name, num_blocks))
    num_hit = halves.admit(request)
    assert num_hit is not None
    if num_hit:
        assert halves.drain() == {name: False}
        halves.cache_loaded(request)
    halves.compute(request, num_blocks)
    halves.finish(request)
    halves.drain()
    return num_hit


class Gate:
    """Makes the stores of a worker wait until the gate is opened."""

    def __init__(self, monkeypatch, worker):
        self.opened = threading.Event()
        self.reached = threading.Event()
        method = worker._copy_down

        def wait(*args):
            self.reached.set()
            assert self.opened.wait(TIMEOUT_S)
            return method(*args)

        monkeypatch.setattr(worker, "_copy_down", wait)


def host_of(halves, rank=0):
    return halves.workers[rank].stack.tiers[0]


def test_a_store_leases_its_blocks(make_halves, monkeypatch):
    halves = make_halves(num_blocks=12, host=20)
    gate = Gate(monkeypatch, halves.workers[0])
    request = start(halves, "a", 5)
    halves.finish(request)
    halves.send()
    assert gate.reached.wait(TIMEOUT_S)
    assert halves.pool.get_num_free_blocks() == 6
    assert halves.scheduler.holds_freed_blocks()
    for block in halves.pool.get_new_blocks(6):  # all that are free are reused and overwritten
        halves.memory[0][block.block_id] = 255
    gate.opened.set()
    halves.collect()
    assert not halves.scheduler.holds_freed_blocks()
    assert halves.pool.get_num_free_blocks() == 5
    again = halves.make_request("again", hashes("a", 4))
    assert halves.scheduler.find_hit(again, 0) == 16
    host = host_of(halves)
    for key in host.list_keys():
        read = host.read([key])
        assert read.storage.read_block(read.block_ids[0]) == bytes(make_content(key, 0))


def test_what_a_late_store_has_read_is_dropped(make_halves, monkeypatch):
    halves = make_halves(num_blocks=12, lease_s=10)
    gate = Gate(monkeypatch, halves.workers[0])
    request = start(halves, "a", 5)
    halves.finish(request)
    halves.send()
    halves.clock.now = 11
    halves.send()
    assert halves.pool.get_num_free_blocks() == 11
    gate.opened.set()
    halves.collect()
    assert len(halves.index.host) == 0
    assert halves.scheduler.take_counts()["lost blocks"] == 5
    halves.drain()  # the workers drop the blocks, too
    assert len(host_of(halves)) == 0
    assert run(halves, "again", 5, "a") == 0
    assert len(halves.index.host) == 5


def test_loads_overtake_stores(make_halves, monkeypatch):
    halves = make_halves(num_blocks=40, host=20)
    run(halves, "a", 3)
    gate = Gate(monkeypatch, halves.workers[0])
    order = []
    worker = halves.workers[0]
    for one, name in ((worker, "_copy_down"), (worker.stack, "load_into")):
        method = getattr(one, name)
        monkeypatch.setattr(
            one, name, lambda *args, name=name, method=method: [order.append(name), method(*args)][1]
        )
    for name in ("b", "c"):
        request = start(halves, name, 2)
        halves.finish(request)
        halves.send()
    assert gate.reached.wait(TIMEOUT_S)
    again = halves.make_request("again", hashes("a", 3))
    assert halves.admit(again) == 12
    halves.send()
    gate.opened.set()
    assert halves.collect() == {"again": False}
    assert order == ["_copy_down", "load_into", "_copy_down"]


def test_held_blocks_are_not_evicted_before_a_load(make_halves):
    halves = make_halves(num_blocks=60, host=6, disk=0)
    run(halves, "a", 3)
    again = halves.make_request("again", hashes("a", 3))
    assert halves.scheduler.find_hit(again, 0) == 12
    for number in range(4):
        run(halves, f"other {number}", 3)
    assert halves.admit(again) == 12
    assert halves.drain() == {"again": False}
    halves.cache_loaded(again)
    halves.finish(again)
    for number in range(4, 8):
        run(halves, f"other {number}", 3)
    assert halves.scheduler.find_hit(again, 0) == 0


def test_the_report_has_contents_hits_and_what_was_not_stored(make_halves):
    halves = make_halves(num_blocks=60, host=6, disk=6)
    for name in ("a", "b", "c"):
        run(halves, name, 3)
    assert run(halves, "again", 3, "c") == 12
    assert run(halves, "again", 3, "a") == 12
    halves.scheduler.take_counts()
    report = halves.scheduler.get_report(7)
    assert report.hit_blocks == {"GPU": 7, "CPU": 3, "STORAGE": 3}
    told = [(one.medium, one.capacity, one.num_blocks, one.num_stored, one.num_read) for one in report.tiers]
    assert told == [("CPU", 6, 6, 12, 3), ("STORAGE", 6, 6, 6, 3)]
    assert {one.block_bytes for one in report.tiers} == {32}
    assert report.num_dropped == 0
    halves.scheduler.apply_report(WorkerReport(has_lost_disk=True))
    assert halves.scheduler.get_report(7).hit_blocks == report.hit_blocks


def test_a_hit_that_the_engine_shortens(make_halves):
    halves = make_halves(12, None, num_blocks=60, host=40)
    run(halves, "a", 8)
    again = halves.make_request("again", hashes("a", 8))
    assert halves.scheduler.find_hit(again, 0) == 32
    tables = [[block.block_id for block in halves.pool.get_new_blocks(9)] for _ in range(2)]
    halves.tables["again"] = tables
    halves.scheduler.plan_load(again, tables, 16)
    again.num_computed_tokens = 16
    assert halves.drain() == {"again": False}
    halves.cache_loaded(again)
    halves.finish(again)


def test_a_block_that_was_in_a_window_is_stored(make_halves):
    halves = make_halves(4, num_blocks=40, host=30)
    request = start(halves, "a", 6)
    table = halves.tables["a"][0]
    halves.pool.free_blocks(halves.pool.blocks[block_id] for block_id in table[:4])
    table[:4] = [halves.pool.null_block.block_id] * 4
    halves.step(["a"])
    assert len(halves.index.host) == 6
    halves.finish(request)


def test_blocks_without_a_place_are_stored_later(make_halves):
    halves = make_halves(num_blocks=40, host=4, disk=0)
    request = start(halves, "a", 6)
    sizes = []
    for _ in range(3):
        halves.send(["a"])
        sizes.append(halves.index.num_arriving)
        halves.collect()
    assert sizes == [2, 2, 2]
    halves.finish(request)
    assert halves.scheduler.take_counts().get("skipped blocks", 0) == 0


def test_the_first_block_of_a_request_is_evicted_last(make_halves):
    halves = make_halves(num_blocks=60, host=6, disk=0)
    run(halves, "a", 3)
    run(halves, "b", 3)
    assert [key[:2] for key in halves.index.host.list_keys()] == [b"a2", b"a1", b"a0", b"b2", b"b1", b"b0"]
    again = halves.make_request("again", hashes("a", 3))
    halves.scheduler.find_hit(again, 0)
    assert [key[:2] for key in halves.index.host.list_keys()][3:] == [b"a2", b"a1", b"a0"]


def test_a_block_is_used_when_its_request_ends(make_halves):
    halves = make_halves(num_blocks=60, host=6, disk=0)
    request = start(halves, "a", 3)
    halves.step(["a"])
    run(halves, "b", 3)
    halves.finish(request)
    assert [key[:2] for key in halves.index.host.list_keys()][3:] == [b"a2", b"a1", b"a0"]


def test_blocks_are_stored_at_multiples_of_the_alignment(make_halves):
    """An engine with several groups hashes a block only with those of the other groups."""
    halves = make_halves(num_blocks=60, host=20, alignment=8)
    request = start(halves, "a", 4, 2)
    request.num_computed_tokens = 12
    halves.step(["a"])
    assert len(halves.index.host) == 2
    request.num_computed_tokens = 8
    halves.compute(request, 4)
    halves.step(["a"])
    assert len(halves.index.host) == 4
    halves.finish(request)


def test_tokens_in_flight_are_not_stored(make_halves):
    halves = make_halves(num_blocks=60, host=20)
    request = start(halves, "a", 3)
    request.num_in_flight_tokens = 8
    halves.step(["a"])
    assert len(halves.index.host) == 1
    request.num_in_flight_tokens = 0
    halves.step(["a"])
    assert len(halves.index.host) == 3
    halves.finish(request)


def test_a_running_request_is_stored_again_after_a_reset(make_halves):
    halves = make_halves(num_blocks=60, host=20)
    request = start(halves, "a", 3, 2)
    halves.step(["a"])
    assert halves.scheduler.reset()
    halves.step(["a"])
    assert len(halves.index.host) == 2
    assert len(host_of(halves)) == 2
    halves.finish(request)


def test_nothing_is_loaded_into_the_null_block(make_halves):
    halves = make_halves(num_blocks=60, host=20)
    run(halves, "a", 3)
    again = halves.make_request("again", hashes("a", 3))
    assert halves.scheduler.find_hit(again, 0) == 12
    block_id = halves.pool.get_new_blocks(1)[0].block_id
    halves.scheduler.plan_load(again, [[0, 0, block_id]], 12)
    (load,) = halves.scheduler.take_orders([]).loads
    assert list(load.blocks.values()) == [block_id]


def test_a_copy_that_fails_is_lost_and_not_found(make_halves, monkeypatch):
    halves = make_halves()

    def fail(*args):
        raise CopyFailedError("no copy")

    monkeypatch.setattr(host_of(halves), "put", fail)
    run(halves, "a", 3)
    assert len(halves.index.host) == 0
    assert halves.scheduler.take_counts()["lost blocks"] == 3
    assert halves.pool.get_num_free_blocks() == 29


@pytest.mark.parametrize("error", [CopyFailedError("no copy"), MemoryError("no memory")])
def test_a_load_that_fails_is_reported(make_halves, monkeypatch, error):
    halves = make_halves(num_ranks=2)
    run(halves, "a", 3)

    def fail(*args):
        raise error

    monkeypatch.setattr(host_of(halves, 1), "load", fail)
    again = halves.make_request("again", hashes("a", 3))
    assert halves.admit(again) == 12
    assert halves.drain() == {"again": True}
    assert halves.scheduler.find_hit(halves.make_request("third", hashes("a", 3)), 0) == 0
    halves.drain()
    assert len(host_of(halves, 0)) == len(host_of(halves, 1)) == 0


def test_a_store_is_finished_when_all_ranks_have_finished(make_halves, monkeypatch):
    halves = make_halves(num_ranks=2)
    gate = Gate(monkeypatch, halves.workers[1])
    request = start(halves, "a", 2)
    halves.finish(request)
    halves.send()
    assert halves.workers[0].wait(TIMEOUT_S)
    halves.collect(waits=False)
    assert len(halves.index.host) == 0
    assert halves.scheduler.has_work()
    gate.opened.set()
    halves.collect()
    assert len(halves.index.host) == 2
    assert not halves.scheduler.has_work()


def test_a_disk_that_cannot_be_cleared_is_closed(make_halves, monkeypatch):
    halves = make_halves(host=4)
    for name in "abc":
        run(halves, name, 3)
    assert len(halves.index.disk) > 0

    def fail():
        raise TierError("no clear")

    monkeypatch.setattr(halves.workers[0].stack.tiers[1], "clear", fail)
    assert halves.scheduler.reset()
    halves.drain()
    assert halves.index.disk is None
    assert len(halves.workers[0].stack.tiers) == 1
    assert run(halves, "again", 3, "a") == 0
    run(halves, "d", 3)
    assert run(halves, "again", 3, "d") > 0


def test_a_tier_that_is_fuller_than_the_index_says(make_halves):
    halves = make_halves(num_blocks=60, host=4, disk=0)
    run(halves, "a", 2)
    run(halves, "b", 2)
    halves.index.remove([key for key in halves.index.host.list_keys() if key.startswith(b"a")])
    run(halves, "c", 2)
    assert len(host_of(halves)) == 4
    halves.drain()
    assert set(host_of(halves).list_keys()) >= set(halves.index.host.list_keys())


def test_closing_drops_waiting_orders(make_halves, monkeypatch):
    halves = make_halves(num_blocks=60)
    gate = Gate(monkeypatch, halves.workers[0])
    for name in ("a", "b"):
        request = start(halves, name, 2)
        halves.finish(request)
        halves.send()
    assert gate.reached.wait(TIMEOUT_S)
    closing = threading.Thread(target=halves.close)
    closing.start()
    gate.opened.set()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert halves.workers[0].take_report().stored == {1: 1}
    halves.workers[0].start_stores(StepOrders(stores=[StoreOrder(9, {})]))
    halves.close()


def test_blocks_are_copied_without_a_thread_of_their_own(make_halves, caplog):
    halves = make_halves()
    with no_new_threads():
        run(halves, "a", 3)
        assert run(halves, "again", 3, "a") == 12
    assert "copies blocks in the engine's thread" in caplog.text


def test_an_order_that_fails_is_logged_and_the_next_one_runs(make_halves, monkeypatch, caplog):
    halves = make_halves()
    run(halves, "a", 3)

    def fail(keys):
        raise RuntimeError("no removal")

    monkeypatch.setattr(halves.workers[0].stack, "remove", fail)
    halves.workers[0].start_stores(StepOrders(forgotten=[b"a0"]))
    run(halves, "b", 3)
    assert len(halves.index.host) == 6
    assert [record.name for record in caplog.records if record.exc_info] == ["vllm.kv_pool"]


def test_hits_are_aligned(make_halves):
    halves = make_halves()
    run(halves, "a", 3)
    again = halves.make_request("again", hashes("a", 3))
    assert halves.scheduler.find_hit(again, 2) == 0
    assert halves.scheduler.find_hit(again, BLOCK_SIZE) == 8
    again.num_tokens = 12  # the last token is computed
    assert halves.scheduler.find_hit(again, 0) == 8
