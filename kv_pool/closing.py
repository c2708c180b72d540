"""`Closing`, `Running`: objects that a `with` block closes, or starts and stops."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A `with` block calls `close` at its end."""

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Running(ABC):
    """A `with` block calls `start` before it begins, and `stop` at its end."""

    @abstractmethod
    def start(self) -> None:
        """Start what runs in the background."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it, and wait for it."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()
