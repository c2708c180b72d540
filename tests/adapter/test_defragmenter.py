"""`Defragmenter` on a `GPUKVPool`: by threshold, by interval, a few blocks at a time, and from a thread.

Drawn: one character a block, `.` free, the last digit of the sequence that holds it.
"""

import random
import threading

import pytest
from adapter.made_pool import (
    BreakingCopy,
    check,
    draw,
    fill,
    make,
    make_scattered,
    make_storage,
    read,
    take,
    write,
)

from kv_pool import CopyFailedError, InvalidArgumentError
from kv_pool.contiguous.defragmenter import BackgroundDefragmenter, Defragmenter

WAIT_S = 60


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_step_moves_at_most_max_moves_and_the_next_continues():
    pool = make_scattered(run_length=2)
    defragmenter = Defragmenter(pool, interval_s=100, max_moves=1, clock=Clock())
    pictures = [draw(pool)]
    while defragmenter.step():
        pictures.append(draw(pool))
    assert pictures == ["1.2.3.4.5.", "1...3.425.", "1....3425."]
    assert (pool.get_fragmentation_rate(), pool.block_pool.get_unusable_share(2)) == (0, pytest.approx(0.2))
    assert (defragmenter.num_compactions, defragmenter.num_moves) == (1, 2)


def test_a_pool_below_the_threshold_is_left_alone():
    pool = make_scattered(run_length=2)
    pool.free_sequence(5)  # 1.2.3.4...: one of the 6 free blocks is part of a run of 2, and its neighbour
    assert pool.get_fragmentation_rate() == pytest.approx(4 / 6)
    assert Defragmenter(pool, threshold=0.7).step() == 0
    assert Defragmenter(pool, threshold=0.6).step() == 2


def test_an_idle_pool_is_checked_once_per_interval():
    clock = Clock()
    pool = make(run_length=5)
    defragmenter = Defragmenter(pool, interval_s=60, clock=clock)
    assert defragmenter.step() == 0
    for sequence_id in range(10):
        take(pool, sequence_id, 1)
    for sequence_id in range(0, 10, 2):
        pool.free_sequence(sequence_id)
    clock.now = 59
    assert defragmenter.step() == 0
    clock.now = 60
    assert defragmenter.step() > 0


def test_a_compaction_ends_at_its_goal():
    pool = make_scattered(run_length=2)
    defragmenter = Defragmenter(pool, threshold=0.9, goal=0.6, max_moves=1)
    assert defragmenter.step() == 1
    assert not defragmenter.is_compacting
    assert pool.get_fragmentation_rate() <= 0.6


def test_if_nothing_can_move_the_next_check_waits():
    clock = Clock()
    pool = make_scattered(run_length=5)
    held = [block_id for sequence_id in pool.list_sequences() for block_id in pool.blocks_of(sequence_id)]
    pool.pin(held)
    defragmenter = Defragmenter(pool, interval_s=60, max_moves=1, clock=clock)
    assert defragmenter.step() == 0
    pool.unpin(held)
    assert defragmenter.step() == 0
    clock.now = 60
    assert defragmenter.step() == 1


def test_after_a_failed_copy_the_next_attempt_waits():
    clock = Clock()
    copy = BreakingCopy()
    pool = make_scattered(run_length=5, storage=make_storage(copy=copy))
    fill(pool)
    before = {sequence_id: read(pool, sequence_id) for sequence_id in pool.list_sequences()}
    defragmenter = Defragmenter(pool, interval_s=60, clock=clock)
    copy.num_good = 0
    with pytest.raises(CopyFailedError, match="the device fell off the bus"):
        defragmenter.step()
    copy.num_good = None
    assert draw(pool) == "1.2.3.4.5."
    assert defragmenter.step() == 0
    clock.now = 60
    assert defragmenter.step() == 3
    check(pool)
    assert {sequence_id: read(pool, sequence_id) for sequence_id in pool.list_sequences()} == before


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 1.1},
        {"threshold": 0.1, "goal": 0.2},
        {"goal": -0.1},
        {"interval_s": -1},
        {"max_moves": 0},
        {"max_evictions": -1},
    ],
)
def test_invalid_settings_are_refused(options):
    with pytest.raises(InvalidArgumentError):
        Defragmenter(make(), **options)


# ---- from a thread -------------------------------------------------------------------------------


def test_a_thread_compacts_while_others_allocate_and_free():
    """A reader that holds the guard sees its bytes under its ids, however often they change."""
    guard = threading.Lock()
    pool = make(60, storage=make_storage(61), run_length=8)
    defragmenter = Defragmenter(pool, interval_s=0, max_moves=2)
    errors = []

    def work(number):
        rng = random.Random(number)
        try:
            for _ in range(200):
                with guard:
                    for block_id in take(pool, number, rng.randint(1, 3), contiguous="no"):
                        write(pool, block_id, number)
                with guard:
                    assert set(read(pool, number)) == {number}
                    if rng.random() < 0.4 or len(pool.blocks_of(number)) > 8:
                        pool.free(rng.sample(pool.blocks_of(number), 1))
                        if len(pool.blocks_of(number)) > 8:
                            pool.free_sequence(number)
        except BaseException as error:
            errors.append(error)

    with BackgroundDefragmenter(defragmenter, pause_s=0, guard=guard):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "deadlock"
    assert not errors
    assert defragmenter.num_moves > 0
    check(pool)


def test_stop_raises_the_copy_error_that_ended_the_thread(caplog):
    failed = threading.Event()

    def copy(*arguments):
        failed.set()
        raise RuntimeError("the device is gone")

    pool = make_scattered(run_length=5, storage=make_storage(copy=copy))
    background = BackgroundDefragmenter(Defragmenter(pool), pause_s=0)
    background.start()
    assert failed.wait(WAIT_S)
    with pytest.raises(CopyFailedError, match="the device is gone"):
        background.stop()
    assert draw(pool) == "1.2.3.4.5."
    assert "no block of this step has moved" in caplog.text
    background.stop()  # stopped already


def test_the_engines_exception_takes_precedence():
    failed = threading.Event()

    def copy(*arguments):
        failed.set()
        raise RuntimeError("the device is gone")

    pool = make_scattered(run_length=5, storage=make_storage(copy=copy))

    def run():
        with BackgroundDefragmenter(Defragmenter(pool), pause_s=0):
            assert failed.wait(WAIT_S)
            raise KeyError("the engine")

    with pytest.raises(KeyError, match="the engine"):
        run()


def test_it_starts_once_and_can_be_restarted():
    background = BackgroundDefragmenter(Defragmenter(make()))
    background.start()
    with pytest.raises(InvalidArgumentError, match="already running"):
        background.start()
    background.stop()
    background.start()
    background.stop()


def test_a_negative_pause_is_refused():
    with pytest.raises(InvalidArgumentError, match="pause_s is -1"):
        BackgroundDefragmenter(Defragmenter(make()), pause_s=-1)
