"""`write_sessions`: one document of kv-cache-tester for each session."""

from collections.abc import Callable, Iterable

from kv_pool.errors import TraceError
from kv_pool.replay.formats.foreign_request import ForeignRequest
from kv_pool.replay.formats.kv_cache_tester import begin_session, make_session_request
from kv_pool.replay.part_files import open_parts


def write_sessions(
    requests: Iterable[ForeignRequest],
    get_block_size: Callable[[], int],
    pattern: str,
    on_request: Callable[[], None],
) -> None:
    """Write each session to a file of its own; requests without a session are sessions of one request.

    Args:
        get_block_size: returns the tokens per id, once there is a request.
        pattern: path of the files, with `{part}` for the number of the session.
    Raises:
        InvalidArgumentError: the pattern has no `{part}`, or there are too many sessions.
        TraceError: there is no request, or a file cannot be written. No file has changed.
    """
    sessions: dict[tuple[str | None, str | None, int], tuple[str, float]] = {}
    with open_parts(pattern) as parts:
        for request in requests:
            number = request.line if request.session_id is None else 0
            key = (request.tenant, request.session_id, number)
            found = sessions.get(key)
            if found is None:
                part = f"{len(sessions) + 1:04}"
                sessions[key] = found = (part, request.arrival_ms)
                name = request.session_id if request.session_id is not None else f"request-{request.line}"
                parts.append(part, request.line, begin_session(name, get_block_size()))
            else:
                parts.append(found[0], request.line, b",\n")
            line = make_session_request(request, found[1], get_block_size())
            parts.append(found[0], request.line, parts.encode(line))
            on_request()
        if not sessions:
            raise TraceError(f"{pattern}: not written: the input contains no request")
        for part, _ in sessions.values():
            parts.append(part, 0, b"]}\n")
        parts.finish()
