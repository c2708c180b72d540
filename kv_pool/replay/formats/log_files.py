"""`list_log_files`: the files of a folder that are logs, each once."""

import re
from pathlib import Path

from kv_pool.errors import TraceError

_COMPRESSED = r"(\.gz|\.xz|\.zst)?"


def list_log_files(folder: Path, pattern: str, description: str) -> tuple[list[Path], list[str]]:
    """Return the files of a folder whose names match, in the order of their names.

    A file that is there plain and compressed is one file: the plain one is read.

    Args:
        pattern: a regular expression for names without the suffix of a compression.
        description: such names, for the error message.
    Returns:
        The files, and a note for each other file whose name begins like one of them: a compressed copy, or
        a copy of an editor.
    Raises:
        TraceError: there is no such file.
    """
    matcher = re.compile(f"(?P<plain>{pattern}){_COMPRESSED}", re.IGNORECASE)
    files: dict[str, Path] = {}
    passed: list[Path] = []
    for path in sorted(folder.iterdir()):
        found = matcher.match(path.name)
        if found is None or not path.is_file():
            continue
        if found.end() < len(path.name) or found["plain"] in files:
            passed.append(path)
        else:
            files[found["plain"]] = path
    if not files:
        raise TraceError(f"{folder}: the folder has no files {description}")
    return list(files.values()), [f"not read: {path}, a copy by its name" for path in passed]
