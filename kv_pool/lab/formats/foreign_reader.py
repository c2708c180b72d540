"""`ForeignReader`: reads the requests of one format of traces or request logs."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kv_pool.errors import TraceError
from kv_pool.lab.line_reader import MAX_LINE_BYTES, LineReader
from kv_pool.lab.trace import TraceRequest, check_blocks, find_ms_per_unit

_COMPRESSED = r"(\.gz|\.xz|\.zst)?"
_Item = TypeVar("_Item")


class ForeignReader:
    """A format: reads the requests of a file, or of a folder of log files, in its order, and makes its lines.

    Args:
        path: the file; or, of formats with `log_names`, a folder, whose files are read in the order of their
            names.
        skip_broken: skip broken lines and count them, instead of raising an error.
        block_size: tokens per hash id, of formats that do not contain it.
        timestamp_unit: as in `Trace`; None for the format's unit.
        session_gap_s: seconds between the starts of two sessions, of formats that do not contain it.
    Raises:
        InvalidArgumentError: the unit is unknown.
        TraceError: there is no such file, or the folder has none; while iterating, a line is broken.

    Attributes:
        losses: what is lost or unknown of such files.
        write_losses: what is lost in written files; empty for a format that is read only.
        log_names: a regular expression for the names of log files in a folder, without the suffix of a
            compression, and such names in words; None if only a file can be read.
        default_unit: the unit of the format's times.
        max_line_bytes: maximum length of a line, also in memory.
        block_size: tokens per key; None for token ids, and until the first request tells it.
        num_broken, first_broken: as in `Trace`.
        notes: what else the caller should know of the input, once it is read.
    """

    losses: ClassVar[tuple[str, ...]]
    write_losses: ClassVar[tuple[str, ...]] = ()
    log_names: ClassVar[tuple[str, str] | None] = None
    default_unit: ClassVar[str] = "s"
    max_line_bytes: ClassVar[int] = MAX_LINE_BYTES
    block_size: int | None

    def __init__(
        self,
        path: Path,
        *,
        skip_broken: bool = False,
        block_size: int | None = None,
        timestamp_unit: str | None = None,
        session_gap_s: float = 0.0,
    ) -> None:
        self.block_size = None
        self.notes: list[str] = []
        self._given_block_size = block_size
        self._ms_per_unit = find_ms_per_unit(timestamp_unit or self.default_unit)
        self._has_unit = timestamp_unit is not None
        self._gap_s = session_gap_s
        if not path.exists():
            raise TraceError(f"{path}: no such file")
        if self.log_names is None and not path.is_file():
            raise TraceError(f"{path}: this is no file")
        paths = [path]
        if self.log_names is not None and path.is_dir():
            paths, self.notes = list_log_files(path, *self.log_names)
        self._files = [LineReader(one, self.max_line_bytes, skip_broken=skip_broken) for one in paths]

    @property
    def num_broken(self) -> int:
        return sum(file.num_broken for file in self._files)

    @property
    def first_broken(self) -> str | None:
        return next((file.first_broken for file in self._files if file.first_broken), None)

    def __iter__(self) -> Iterator[TraceRequest]:
        yield from self._read(self._parse)

    def _parse(self, text: bytes, line: int) -> TraceRequest | None:
        """Return the request of a line; None if it has none. For formats with a request on each line."""
        raise NotImplementedError

    @staticmethod
    def make_lines(request: TraceRequest, number: int, block_size: int | None) -> list[dict[str, Any]]:
        """Return the lines of a request with integer keys or token ids.

        Args:
            number: of the request, counted from 1.
            block_size: tokens per key; None for token ids.
        Raises:
            ValueError: the format cannot hold the request.
        """
        raise NotImplementedError

    def _read(self, parse: Callable[[bytes, int], _Item | None]) -> Iterator[_Item]:
        """Yield what `parse` returns for the lines of all files, except None."""
        for file in self._files:
            yield from (found for found in file.read(parse) if found is not None)

    def _check_blocks(self, request: TraceRequest, block_size: int) -> TraceRequest:
        """Return the request. Raise ValueError if its keys do not fit the block size, or that has changed."""
        check_block_size(block_size, self.block_size)
        check_blocks(request.input_length, len(request.hash_ids or ()), block_size)
        self.block_size = block_size
        return request


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


def check_block_size(found: int, expected: int | None) -> int:
    """Return the block size of a request. Raises ValueError if it differs from that of earlier ones."""
    if found < 1:
        raise ValueError(f"the block size is {found} tokens")
    if expected is not None and found != expected:
        raise ValueError(f"the block size is {found} tokens, that of earlier requests {expected}")
    return found
