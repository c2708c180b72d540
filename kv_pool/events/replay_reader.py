"""`ReplayReader`: one reader on the replay socket: what it asked for, and what it has not read yet."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_WAITING_REQUESTS = 8
"""Requests of one reader that wait for the answers before them."""

LEAST_BYTES_PER_S = 1_000_000
"""A reader that reads as fast as this is never dropped."""


@dataclass(slots=True)
class Reply:
    """One message to a reader.

    Attributes:
        frames: without the reader's identity.
        is_tracked: True if ZeroMQ is to report when it has let go of it, which costs something.
        is_snapshot, is_end: what it is, if not a batch.
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
        tracker: done when ZeroMQ has let go of it.
    """

    reply: Reply
    tracker: Any


@dataclass(slots=True)
class ReplayReader:
    """What the replay server knows of one reader, from its first request until it has read all answers.

    Attributes:
        descriptor: of the connection that its latest request came over; -1 if there is none (inproc).
        progress_s: when it last read something, or had nothing to read.
        starts: the sequences that wait for an answer.
        answer: the rest of the answer under way; None between two answers.
        next_reply: the reply that found no room.
        unread: tracked replies that were sent, oldest first.
    """

    identity: bytes
    descriptor: int
    progress_s: float
    starts: deque[int] = field(default_factory=deque)
    answer: Iterator[Reply | None] | None = None
    next_reply: Reply | None = None
    unread: deque[UnreadReply] = field(default_factory=deque)

    def note_progress(self, now: float) -> None:
        """Forget the replies that were read."""
        while self.unread and self.unread[0].tracker.done:
            self.unread.popleft()
            self.progress_s = now

    @property
    def is_served(self) -> bool:
        """True between the first reply of an answer and the moment when all was read."""
        return self.answer is not None or bool(self.unread)

    @property
    def is_done(self) -> bool:
        """True if nothing is left to do for it."""
        return not self.is_served and not self.starts

    def count_unread(self) -> int:
        """Bytes of the tracked replies that it has not read."""
        return sum(len(unread.reply.payload) for unread in self.unread)

    def find_deadline(self, slow_reader_s: float) -> float:
        """When it counts as slow if it reads nothing until then."""
        return self.progress_s + slow_reader_s + self.count_unread() / LEAST_BYTES_PER_S
