"""`ReplayRetention`: sets the retention of a replay's blocks, in virtual time."""

from kv_pool.core.pool_core import BlockPoolCore
from kv_pool.errors import InvalidArgumentError
from kv_pool.manager.retention.block_retention import BlockRetention
from kv_pool.manager.retention.directive import MAX_PRIORITY, RetentionDirective
from kv_pool.replay.replay_request import ReplayRequest


class ReplayRetention:
    """Sets the retention of the blocks of requests that end.

    Args:
        pool: the pool of the blocks.
        session_s: seconds for which a session's blocks are retained for its next turn; 0 for none.
        prefix_tokens: number of tokens at the start of each prompt, such as a system prompt, whose blocks are
            evicted last; 0 for none.

    Attributes:
        now_ms: the current time; never decreases.
        num_kept_sessions: number of ended requests whose session's blocks were retained.
    """

    def __init__(self, pool: BlockPoolCore, session_s: float, prefix_tokens: int) -> None:
        if not 0 <= session_s < float("inf") or prefix_tokens < 0:
            raise InvalidArgumentError(
                f"session_s is {session_s} and prefix_tokens {prefix_tokens}; both must be 0 or more"
            )
        self.now_ms = 0.0
        self.num_kept_sessions = 0
        self.retention = BlockRetention(pool, lambda: self.now_ms / 1000)
        self._session_s = session_s
        self._directives = []
        if prefix_tokens:
            self._directives.append(RetentionDirective(0, prefix_tokens, priority=MAX_PRIORITY))

    def keep(self, request: ReplayRequest) -> None:
        """Set the retention of an ended request's blocks. Call it directly before freeing the request."""
        if self._directives:
            self.retention.set_directives(request.request_id, self._directives)
        if self._session_s and request.session_id is not None:
            until = self.now_ms / 1000 + self._session_s
            self.retention.keep_session(request.session_id, request, until)
            self.num_kept_sessions += 1
