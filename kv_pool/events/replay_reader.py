"""`ReplayReader`: one reader on the replay socket, with its requests and unread replies."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_WAITING_REQUESTS = 8
"""Maximum number of queued requests of one reader."""

LEAST_BYTES_PER_S = 1_000_000
"""A reader that reads as fast as this is never dropped."""


@dataclass(slots=True)
class Reply:
    """One message to a reader.

    Attributes:
        frames: without the reader's identity.
        is_tracked: whether ZeroMQ reports when it has released the message, at some cost.
        is_snapshot, is_end: whether it is a snapshot or the end marker rather than a batch.
        tracker: of a tracked reply that was sent; done when ZeroMQ has released the message.
    """

    frames: list[bytes]
    is_tracked: bool = False
    is_snapshot: bool = False
    is_end: bool = False
    tracker: Any = None

    @property
    def payload(self) -> bytes:
        return self.frames[-1]


@dataclass(slots=True)
class ReplayReader:
    """The replay server's state for one reader, from its first request until it has read all answers.

    Attributes:
        progress_s: the last time at which it read a reply or had none to read.
        starts: the start sequences of queued requests.
        answer: the rest of the current answer; None between two answers.
        next_reply: the reply that could not be sent yet.
        unread: tracked replies that were sent but not read, oldest first.
    """

    identity: bytes
    progress_s: float
    starts: deque[int] = field(default_factory=deque)
    answer: Iterator[Reply | None] | None = None
    next_reply: Reply | None = None
    unread: deque[Reply] = field(default_factory=deque)

    def note_progress(self, now: float) -> None:
        """Remove the replies that were read."""
        while self.unread and self.unread[0].tracker.done:
            self.unread.popleft()
            self.progress_s = now

    def drop_requests(self) -> None:
        """Drop its requests and the rest of the current answer; unread replies still count."""
        self.answer = None
        self.next_reply = None
        self.starts.clear()

    def is_waiting(self) -> bool:
        """Return True if it has a request that is not answered completely."""
        return self.answer is not None or bool(self.starts)

    @property
    def is_done(self) -> bool:
        """Whether all its requests are answered, and all tracked replies read."""
        return not self.is_waiting() and not self.unread

    def count_unread(self) -> int:
        """Return the size of its unread tracked replies, in bytes."""
        return sum(len(unread.payload) for unread in self.unread)

    def find_deadline(self, slow_reader_s: float) -> float:
        """Return the time at which the reader counts as slow if it reads nothing until then."""
        return self.progress_s + slow_reader_s + self.count_unread() / LEAST_BYTES_PER_S
