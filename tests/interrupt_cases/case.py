"""`Case`: a call to interrupt, on a subject that can be repaired and checked; what all subjects do alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

from kv_pool import AllBlocksCleared, BlockStored


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


class Subject:
    """A subject that needs no closing."""

    def close(self):
        pass


def follow(announced, events):
    """Return the (medium, hash, group) that are announced after these events."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            announced = set()
            continue
        names = {(event.medium, name, event.group_idx) for name in event.block_hashes}
        announced = announced | names if isinstance(event, BlockStored) else announced - names
    return announced
