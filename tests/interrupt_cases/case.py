"""`Case`: a call to interrupt, on a subject that can be repaired and checked."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One changing call of a public face.

    Attributes:
        make: returns a small new subject with these methods: `is_interrupted()`; `call_next()`, a changing
            call, which raises PoolInterruptedError as long as the subject is not repaired; `repair()`;
            `check(is_repaired)`, which raises if an invariant fails, a request has lost blocks, or a block
            has leaked; and `close()`.
        call: the call to interrupt, with the subject as its argument.
    """

    name: str
    make: Callable[[], Any]
    call: Callable[[Any], object]
