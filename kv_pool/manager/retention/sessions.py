"""`Session` and `Sessions`: conversations whose blocks are kept between two turns."""

from mypy_extensions import i32

from kv_pool.core.block import KVCacheBlock
from kv_pool.core.deadlines import NEVER, TimedItem
from kv_pool.manager.retention.claim import NO_CLAIMS, Claim
from kv_pool.manager.retention.claim_records import ClaimRecords


class Session(TimedItem):
    """A conversation between two turns, and the blocks that are kept for the next turn.

    Attributes:
        claim: the session's claim on each of the blocks.
        changes_at: when the session ends.
    """

    __slots__ = ("blocks", "claim", "session_id")

    def __init__(self, session_id: str, until: float, priority: int, blocks: list[KVCacheBlock]) -> None:
        super().__init__(until)
        self.session_id: str = session_id
        self.claim: Claim = Claim(priority, NEVER, until, True)
        self.blocks: list[KVCacheBlock] = blocks

    def list_claims(self, records: ClaimRecords, now: float) -> list[tuple[Claim, ...]]:
        """Return the claims of each of its blocks: its own and others, without those of ended sessions."""
        listed: list[tuple[Claim, ...]] = []
        before: tuple[Claim, ...] = NO_CLAIMS
        after = self.claim.alone
        last_id: i32 = 0
        for block in self.blocks:
            if block.retention_id != last_id:
                last_id = block.retention_id
                claims = records.get_claims(block)
                if claims is not before:
                    before = claims
                    left = [old for old in claims if old.until > now]
                    after = (*left, self.claim) if left else self.claim.alone
            listed.append(after)
        return listed


class Sessions:
    """The sessions by id, at most `max_sessions` at a time."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions: int = max_sessions
        self.by_id: dict[str, Session] = {}

    def find_one_to_end(self, session_id: str) -> str | None:
        """Return the session to end first, if any: an older one with this id, else the next to end."""
        if session_id in self.by_id:
            return session_id
        if len(self.by_id) < self.max_sessions:
            return None
        return min(self.by_id, key=self._find_end)

    def pop(self, session_id: str) -> Session | None:
        """Remove a session and return it; its deadline no longer applies."""
        session = self.by_id.pop(session_id, None)
        if session is not None:
            session.changes_at = NEVER
        return session

    def list_deadlines(self) -> list[tuple[str, float]]:
        """Return each session with its deadline; the next to end comes first."""
        sessions = [(session_id, session.changes_at) for session_id, session in self.by_id.items()]
        return sorted(sessions, key=get_second)

    def clear(self) -> None:
        """Remove all sessions."""
        for session in self.by_id.values():
            session.changes_at = NEVER
        self.by_id.clear()

    def _find_end(self, session_id: str) -> float:
        return self.by_id[session_id].changes_at


def get_second(pair: tuple[str, float]) -> float:
    """Return the deadline of a listed session."""
    return pair[1]
