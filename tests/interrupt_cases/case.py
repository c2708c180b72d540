"""`Case`: a call to interrupt, and what has to hold after a repair."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One changing call of a public face.

    Attributes:
        make: returns a small subject.
        call: the call to interrupt, on the subject.
        next_call: a changing call; it raises PoolInterruptedError as long as the subject is not repaired.
        repair: repairs the subject.
        check: raises if an invariant fails, a request has lost blocks, or a block has leaked.
    """

    name: str
    make: Callable[[], Any]
    call: Callable[[Any], object]
    next_call: Callable[[Any], object]
    repair: Callable[[Any], object]
    check: Callable[[Any], object]
