"""`Closing`, `Running`: objects that a `with` block closes, or starts and stops."""

from typing import Self


class Closing:
    """A `with` block calls `close` at its end."""

    def close(self) -> None:
        """Release what the object holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Running:
    """A `with` block calls `start` before it begins, and `stop` at its end."""

    def start(self) -> None:
        """Start what runs in the background."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop it, and wait for it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
