"""A call that is interrupted at any point: the next call says so, and a repair makes everything whole."""

import pytest
from interrupt_cases import managers, pools
from interrupting import interrupt_at

from kv_pool import COMPILED, PoolInterruptedError

CASES = [*pools.CASES, *managers.CASES]


def find_broken(case, repair):
    """Interrupt the call at each of its points, in a long call at ever fewer.

    Returns:
        The number of points that were tried, the number of refusals, and the errors with their points.
    """
    broken, num_tried, num_refused, moment = [], 0, 0, 0
    while True:
        moment += 1 + moment // 60
        subject = case.make()
        if not interrupt_at(moment, lambda subject=subject: case.call(subject)):
            return num_tried, num_refused, broken
        num_tried += 1
        try:
            try:
                case.next_call(subject)
            except PoolInterruptedError:
                num_refused += 1
                repair(case, subject, moment)
                case.next_call(subject)
            case.check(subject)
        except Exception as error:
            broken.append((moment, repr(error)[:200]))


def repair_once(case, subject, moment):
    case.repair(subject)


def repair_twice(case, subject, moment):
    """Interrupt the repair, too, at a point that differs from call to call; then repair again."""
    if interrupt_at(1 + moment * 7 % 400, lambda: case.repair(subject)):
        case.repair(subject)


@pytest.mark.skipif(COMPILED, reason="compiled code has no points at which a signal handler runs")
@pytest.mark.parametrize("repair", [repair_once, repair_twice])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_interrupted_call_is_refused_until_a_repair(case, repair):
    num_points, num_refused, broken = find_broken(case, repair)
    assert not broken, f"{len(broken)} of {num_points}: {broken[:3]}"
    assert num_refused
