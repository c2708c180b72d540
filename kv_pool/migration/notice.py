"""`Notice`: a call to the engine that is made once, whatever interrupts it."""

from collections.abc import Callable


class Notice:
    """A call that is to be made once.

    Args:
        call: called again only where an exception that is no `Exception` interrupted it, as a signal handler
            raises one; what it raises otherwise ends it, too.
    """

    def __init__(self, call: Callable[[], object] | None = None) -> None:
        self._call = call

    def send(self) -> None:
        """Make the call, unless it was made."""
        if self._call is None:
            return
        try:
            self._call()
        except Exception:
            self._call = None
            raise
        self._call = None
