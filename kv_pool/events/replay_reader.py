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
    """

    frames: list[bytes]
    is_tracked: bool = False
    is_snapshot: bool = False
    is_end: bool = False

    @property
    def payload(self) -> bytes:
        return self.frames[-1]


@dataclass(slots=True)
class UnreadReply:
    """A reply that was sent.

    Attributes:
        tracker: done when ZeroMQ has released the message.
    """

    reply: Reply
    tracker: Any


@dataclass(slots=True)
class ReplayReader:
    """The replay server's state for one reader, from its first request until it has read all answers.

    Attributes:
        descriptor: file descriptor of the connection of its first pending request; -1 for inproc.
        progress_s: the last time at which it read a reply or had none to read.
        starts: the start sequences of queued requests.
        answer: the rest of the current answer; None between two answers.
        next_reply: the reply that could not be sent yet.
        unread: tracked replies that were sent but not read, oldest first.
    """

    identity: bytes
    descriptor: int
    progress_s: float
    starts: deque[int] = field(default_factory=deque)
    answer: Iterator[Reply | None] | None = None
    next_reply: Reply | None = None
    unread: deque[UnreadReply] = field(default_factory=deque)

    def note_progress(self, now: float) -> None:
        """Remove the replies that were read."""
        while self.unread and self.unread[0].tracker.done:
            self.unread.popleft()
            self.progress_s = now

    @property
    def is_served(self) -> bool:
        """Whether an answer is being sent, or a tracked reply is unread."""
        return self.answer is not None or bool(self.unread)

    @property
    def is_done(self) -> bool:
        """Whether all its requests are answered and read."""
        return not self.is_served and not self.starts

    def count_unread(self) -> int:
        """Return the size of its unread tracked replies, in bytes."""
        return sum(len(unread.reply.payload) for unread in self.unread)

    def find_deadline(self, slow_reader_s: float) -> float:
        """Return the time at which the reader counts as slow if it reads nothing until then."""
        return self.progress_s + slow_reader_s + self.count_unread() / LEAST_BYTES_PER_S
