"""`AllocStatus`: whether a request's blocks can be had now, later, or never."""

from enum import Enum


class AllocStatus(Enum):
    """The answer to `can_allocate`, `can_swap_out` and `can_swap_in`. Source: vLLM 0.6 `AllocStatus`.

    OK: the call that was asked about succeeds, if nothing happens in between.
    LATER: it would if requests that hold blocks now gave them back.
    NEVER: it would not if all others gave theirs back; the request is too large for the pool.
    """

    OK = "ok"
    LATER = "later"
    NEVER = "never"
