"""`AllocStatus`: whether a request can get its blocks now, later, or never."""

from enum import Enum


class AllocStatus(Enum):
    """The result of `can_allocate`, `can_swap_out` and `can_swap_in`. Source: vLLM 0.6 `AllocStatus`.

    OK: the call succeeds if nothing happens in between.
    LATER: the call would succeed if other requests released their blocks.
    NEVER: the call would fail even then; the request is too large for the pool.
    """

    OK = "ok"
    LATER = "later"
    NEVER = "never"
