"""`Keeper`: which blocks a replay keeps for requests to come, in virtual time."""

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.directive import MAX_PRIORITY, RetentionDirective
from kv_pool.replay.replay_request import ReplayRequest


class Keeper:
    """Tells a `BlockRetention` what to keep of requests that end.

    Args:
        session_s: the blocks of a conversation are kept so long for its next turn; 0 for not.
        prefix_tokens: so many tokens at the head of each prompt, a service's system prompt, are the last to
            go; 0 for none.

    Attributes:
        now_ms: the time, never falling.
        num_kept_sessions: how often a request that ended belonged to a session.
    """

    def __init__(self, pool: BlockPoolCore, session_s: float, prefix_tokens: int) -> None:
        if not 0 <= session_s < float("inf") or prefix_tokens < 0:
            raise InvalidArgumentError(
                f"session_s is {session_s} and prefix_tokens {prefix_tokens}; they are 0 or more"
            )
        self.now_ms = 0.0
        self.num_kept_sessions = 0
        self.retention = BlockRetention(pool, lambda: self.now_ms / 1000)
        self._session_s = session_s
        self._directives = []
        if prefix_tokens:
            self._directives.append(RetentionDirective(0, prefix_tokens, priority=MAX_PRIORITY))

    def keep(self, request: ReplayRequest) -> None:
        """Say what its blocks will be worth, just before a request that has ended is freed."""
        if self._directives:
            self.retention.set_directives(request.request_id, self._directives)
        if self._session_s and request.session_id is not None:
            until = self.now_ms / 1000 + self._session_s
            self.retention.keep_session(request.session_id, request, until)
            self.num_kept_sessions += 1
