"""`Case`: a call to interrupt at every point; `try_case` does so."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from interrupting import interrupt_at

from kv_pool.errors import PoolInterruptedError


class Case(NamedTuple):
    """A call to interrupt.

    Attributes:
        make: returns a new subject with `is_interrupted`, `call_next`, `repair`, `check` and `close`.
        call: the call, with the subject as its argument.
    """

    name: str
    make: Callable[[], Any]
    call: Callable[[Any], object]


def try_case(case, repair_step=0):
    """Interrupt the call at every point, repair, and check.

    Args:
        repair_step: interrupt the repair, too, at every n-th of its points; 0 for never.

    Returns:
        The number of points.
    """
    for moment in itertools.count(1):
        for repair_moment in itertools.count(1 + moment % max(1, repair_step), max(1, repair_step)):
            subject = case.make()
            try:
                if not interrupt_at(moment, lambda subject=subject: case.call(subject)):
                    return moment - 1
                is_interrupted = subject.is_interrupted()
                is_whole = True
                if is_interrupted:
                    with pytest.raises(PoolInterruptedError):
                        subject.call_next()
                    is_whole = not repair_step or not interrupt_at(repair_moment, subject.repair)
                    subject.repair()
                subject.check(is_repaired=is_interrupted)  # else it was complete, or nothing has changed
            except BaseException as error:
                error.add_note(f"{case.name}, point {moment}, of the repair {repair_moment}")
                raise
            finally:
                subject.close()
            if is_whole:
                break
    raise AssertionError
