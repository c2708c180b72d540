"""Memory runs out in the middle of a call: the pool is whole, or refuses the next call until a repair."""

import multiprocessing

import pytest
from interrupt_cases import pools

from kv_pool import PoolInterruptedError

testcapi = pytest.importorskip("_testcapi", reason="CPython was built without its test modules")
KINDS = ("plain", "runs")
NUM_ALLOCATIONS = 100
# What a step calls. Code compiled by mypyc does not check whether a float or an int became an object, so that
# rarer calls can crash: `swap_block_ids` does while it lists the watched blocks.
CALLS = ("get_new_blocks", "touch", "free_blocks", "cache_full_blocks", "evict_blocks", "take_events")
CASES = [case for case in pools.CASES if case.name in {f"{kind} {call}" for kind in KINDS for call in CALLS}]


def fails(case, subject, nth):
    """Make the call with its `nth` allocation failing; return True if it raised MemoryError."""
    call, end, failed = case.call, testcapi.remove_mem_hooks, False  # looking them up allocates, too
    testcapi.set_nomemory(nth, nth + 1)
    try:
        call(subject)
    except MemoryError:
        failed = True
    end()
    return failed


def try_all(case, results):
    """Send what is broken after a failure of each allocation, and how many calls raised MemoryError."""
    broken, num_failed = [], 0
    for nth in range(NUM_ALLOCATIONS):
        subject = case.make()
        num_failed += fails(case, subject, nth)
        try:
            is_interrupted = subject.is_interrupted()
            if is_interrupted:
                with pytest.raises(PoolInterruptedError):
                    subject.call_next()
                subject.repair()
            subject.check(is_repaired=is_interrupted)
        except Exception as error:
            broken.append((nth, repr(error)[:200]))
    results.send((broken, num_failed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_pool_is_sound_after_a_memory_error_anywhere(case):
    """In a process of one thread: the allocation that fails may be another thread's."""
    processes = multiprocessing.get_context("fork")
    results, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=try_all, args=(case, sender))
    process.start()
    sender.close()
    broken, num_failed = results.recv()
    process.join()
    assert process.exitcode == 0
    assert num_failed or "take_events" in case.name  # it hardly allocates
    assert not broken, f"{len(broken)} of {num_failed}: {broken[:3]}"
