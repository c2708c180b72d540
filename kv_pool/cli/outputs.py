"""Files that commands write their results to."""

from pathlib import Path

from kv_pool.cli.foreign_text import escape_json
from kv_pool.errors import TraceError
from kv_pool.replay.figure import check_can_draw
from kv_pool.replay.report import encode_json, write_json
from kv_pool.replay.trace_writer import check_can_write


def write_report(report: object, path: str) -> None:
    """Write a report to a file as JSON, or print it on standard output if the file cannot be written.

    Raises:
        TraceError: the file was not written.
    """
    try:
        write_json(report, path)
    except TraceError as error:
        print(escape_json(encode_json(report).decode()))
        raise TraceError(f"{error}; the report is on standard output instead") from error


def choose_files(default_picture: str, picture: str | None, *others: str | None) -> str:
    """Return the path of the picture: `picture`, or for None the first unused one like `default_picture`.

    Call this before the work, whose results these files take.

    Raises:
        KVPoolError: the picture cannot be drawn, or one of the `others` that are not None cannot be written.
    """
    if picture is None:
        picture = _find_unused(default_picture)
    check_can_draw(picture)
    for path in others:
        if path is not None:
            check_can_write(path)
    return picture


def _find_unused(path: str) -> str:
    """Return `path`, or the first unused path with -2, -3 and so on before its suffix."""
    first = Path(path)
    found, number = first, 1
    while found.exists():
        number += 1
        found = first.with_stem(f"{first.stem}-{number}")
    return str(found)
