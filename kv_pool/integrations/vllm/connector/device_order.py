"""`DeviceOrder`: makes copies in a thread wait for the engine's work on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Mark = Any
"""A point in the engine's work on the device; None in host memory, where work is done when a call returns."""


class DeviceOrder:
    """Orders copies after the engine's work, on a stream of their own.

    Args:
        device: `cpu`, or torch's name of another device, such as `cuda:0`.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._stream: Any = None

    def mark(self) -> Mark:
        """Return the end of the work that the calling thread has queued on its current stream."""
        if self.device == "cpu":
            return None
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Run the copies of the `with` statement after `mark`, and wait for them at its end."""
        if self.device == "cpu":
            yield
            return
        import torch

        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
            self._stream.synchronize()
