"""A call that is interrupted at any point: the next call says so, and a repair makes everything whole."""

import pytest
from interrupt_cases import adapter, managers, migration, pools, swap, tiers
from interrupting import interrupt_at

from kv_pool import COMPILED, PoolInterruptedError

CASES = [case for part in (pools, managers, adapter, swap, tiers, migration) for case in part.CASES]


def find_broken(case, slowness):
    """Interrupt the call at each of its points, in a long call at ever fewer.

    Every second time the repair is interrupted, too, at a point that differs from call to call, and repeated.

    Returns:
        The number of points that were tried, and the errors with their points.
    """
    broken, num_tried, moment = [], 0, 0
    while True:
        moment += 1 + moment // slowness
        subject = case.make()
        try:
            if not interrupt_at(moment, lambda subject=subject: case.call(subject)):
                return num_tried, broken
            num_tried += 1
            is_interrupted = subject.is_interrupted()
            if is_interrupted:
                with pytest.raises(PoolInterruptedError):
                    subject.call_next()
                if num_tried % 2 or interrupt_at(1 + moment * 7 % 400, subject.repair):
                    subject.repair()
            subject.check(is_repaired=is_interrupted)
        except Exception as error:
            broken.append((moment, repr(error)[:200]))
        finally:
            subject.close()


@pytest.mark.skipif(COMPILED, reason="compiled code has no points at which a signal handler runs")
@pytest.mark.parametrize("slowness", [8, pytest.param(60, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_interrupted_call_is_refused_until_a_repair(case, slowness):
    num_points, broken = find_broken(case, slowness)
    assert not broken, f"{len(broken)} of {num_points}: {broken[:3]}"
    assert num_points
