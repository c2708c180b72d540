"""`RequestReport`: what became of a request's options, for the answer to the client."""

from typing import Any

import msgspec


class RequestReport(msgspec.Struct, omit_defaults=True):
    """The `kv_pool` object of an answer. Fields at their defaults are left out.

    Attributes:
        retained_tokens: tokens of the request whose blocks its directives or its session keep.
        expires_in_ms: milliseconds until the last of these directives and the session end; absent if one of
            them has no end.
        changed_blocks: cached blocks that `change`, `demote` and `release` have found.
        ended_session: whether the session of `end_session` existed.
        refused: why the options, or the part that the message names, had no effect.
    """

    retained_tokens: int = 0
    expires_in_ms: int | None = None
    changed_blocks: int | None = None
    ended_session: bool | None = None
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict of JSON types."""
        answer: dict[str, Any] = msgspec.to_builtins(self)
        return answer
