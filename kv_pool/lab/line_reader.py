"""`LineReader`: the lines of a foreign file, plain or decompressed as a stream, in bounded memory."""

import gzip
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from kv_pool.core.arguments import as_count
from kv_pool.errors import TraceError
from kv_pool.foreign_bytes import BYTE_ORDER_MARK, UNDECODABLE
from kv_pool.lab.trace_writer import import_zstd

XZ_MEMORY_LIMIT = 256 << 20
"""Memory limit in bytes for decompressing .xz; `xz -9` needs 65 MiB, the format allows 4 GiB."""

_CHUNK = 1 << 16
_BUFFER = 1 << 20


def _unpack_xz(raw: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a .xz file as `lzma.open` reads it, with a memory limit.

    Raises:
        lzma.LZMAError: the data is damaged, or needs more memory than `XZ_MEMORY_LIMIT`.
        EOFError: the data ends inside a stream.
    """
    data = raw.read(_CHUNK)
    while data:
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_LIMIT)
        while not decoder.eof:
            if not data and decoder.needs_input and not (data := raw.read(_CHUNK)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            yield decoder.decompress(data, _BUFFER)
            data = b""
        # Another stream may follow, after zeros that pad to four bytes.
        data = decoder.unused_data.lstrip(b"\0")
        while not data and (chunk := raw.read(_CHUNK)):
            data = chunk.lstrip(b"\0")


class _Pieces(RawIOBase):
    """The content that a decompressor yields in pieces: what comes before damage is read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]  # typeshed: Buffer
        data = self._rest or next(self._pieces, b"")
        found, self._rest = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)


@contextmanager
def decompress(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """Yield the decompressed content of `raw`. Its first bytes decide: gzip, xz, zstd or uncompressed.

    Raises:
        TraceError: the file is zstd, and backports.zstd is not installed.
    """
    magic = raw.read(6)
    raw.seek(0)
    if magic == b"\xfd7zXZ\x00":
        yield BufferedReader(_Pieces(_unpack_xz(raw)), _BUFFER)
        return
    if magic[:2] == b"\x1f\x8b":
        content: Any = gzip.open(raw)  # noqa: SIM115, closed below
    elif magic[:4] == b"\x28\xb5\x2f\xfd":
        content = import_zstd(path, "reading").open(raw)
    else:
        yield raw
        return
    with content:
        yield BufferedReader(_Pieces(iter(partial(content.read1, _BUFFER), b"")), _BUFFER)


MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line, about nine million token ids. A longer line is broken."""

MAX_DECOMPRESSED_BYTES = 64 << 30
"""Maximum decompressed size of a compressed file. Reading beyond it is an error."""

_FOREIGN_FILES = (
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text; save it as UTF-8"),
    ((b"PAR1",), "a Parquet file; write its rows as JSON lines"),
    ((b"PK\x03\x04",), "a zip archive; extract it, or compress the file with gzip, xz or zstd"),
)
"""The first bytes of files that have no lines of JSON, and what they are."""

_Item = TypeVar("_Item")


class LineReader:
    """Reads a file line by line. Each reading starts at the first line.

    Args:
        path: the file.
        max_line_bytes: maximum length of a line, also in memory. A longer line is broken.
        max_decompressed_bytes: maximum decompressed size. Reading beyond it is an error.
        skip_broken: skip broken lines and count them, instead of raising an error.

    Attributes:
        num_broken: number of broken lines in the last reading.
        first_broken: the error message of the first broken line, or None.
        position: share of the file read in the current reading, 0 to 1.

    Raises:
        InvalidArgumentError: a limit is below 1.
    """

    def __init__(
        self,
        path: Path,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
        *,
        skip_broken: bool = False,
    ) -> None:
        self.path = path
        self.skip_broken = skip_broken
        self.num_broken = 0
        self.first_broken: str | None = None
        self.position = 0.0
        self._max_line_bytes = as_count("max_line_bytes", max_line_bytes, 1)
        self._max_decompressed_bytes = as_count("max_decompressed_bytes", max_decompressed_bytes, 1)

    def __repr__(self) -> str:
        return f"<LineReader {str(self.path)!r}: {self.position:.0%} read>"

    def read(
        self, parse: Callable[[bytes, int], _Item], first_line_hint: str = "", *, is_whole: bool = False
    ) -> Iterator[_Item]:
        """Yield what `parse` returns for each line that is not blank.

        Args:
            parse: called with the text of a line and its number, from 1. A decoding error or a ValueError
                that it raises makes the line broken.
            first_line_hint: added to the message of a JSON decoding error in the first line; a table of
                comma-separated values gets another hint.
            is_whole: the file counts as one line, also if it is blank.
        Raises:
            TraceError: a line is broken (the message has file and line number), or the file cannot be
                decompressed.
        """
        self.num_broken = 0
        self.first_broken = None
        self.position = 0.0
        size = self.path.stat().st_size or 1
        with self.open() as raw:
            for number, text in enumerate(self._read_texts(raw, is_whole), 1):
                self.position = raw.tell() / size
                try:
                    if isinstance(text, ValueError):
                        raise text
                    if number == 1:
                        for beginnings, content in _FOREIGN_FILES:
                            if text.startswith(beginnings):
                                raise ValueError(f"this is {content}")
                    text = text.removeprefix(BYTE_ORDER_MARK)
                    if not is_whole and not text.strip():
                        continue
                    found = parse(text, number)
                except UNDECODABLE as error:
                    if number == 1 and isinstance(error, msgspec.DecodeError) and isinstance(text, bytes):
                        error = ValueError(_describe_csv(text) or f"{error}{first_line_hint}")
                    self.pass_broken(number, error, "files" if is_whole else "lines")
                    continue
                yield found
        self.position = 1.0

    def pass_broken(self, line: int, error: Exception, kind: str = "lines") -> None:
        """Count a broken line, if such lines are skipped. Raises TraceError otherwise."""
        message = f"{self.path}:{line}: {error}"
        if not self.skip_broken:
            raise TraceError(f"{message} (--skip-broken or skip_broken=True skips such {kind})") from error
        self.num_broken += 1
        if self.first_broken is None:
            self.first_broken = message

    def open(self) -> BufferedReader:
        """Open the file as stored. Raises TraceError."""
        try:
            return self.path.open("rb")
        except OSError as error:
            raise TraceError(f"{self.path}: cannot open: {error.strerror}") from error

    def _read_texts(self, raw: BufferedReader, is_whole: bool) -> Iterator[bytes | ValueError]:
        """Yield the decompressed lines with their line ends, or the whole file; an error for a broken one."""
        number = 1
        num_bytes = 0
        limit = self._max_line_bytes + 1  # and the line end
        is_inside = False  # inside a line that is too long
        with decompress(raw, self.path) as lines:
            if is_whole:
                yield self._read_whole(lines)
                return
            while True:
                try:
                    text = lines.readline(limit)
                except Exception as error:  # each decompressor has its own exceptions
                    raise TraceError(f"{self.path}:{number}: cannot decompress: {error}") from error
                if not text:
                    return
                num_bytes += len(text)
                if num_bytes > self._max_decompressed_bytes and lines is not raw:
                    raise TraceError(
                        f"{self.path}:{number}: the decompressed file has more than "
                        f"{self._max_decompressed_bytes:,} bytes (max_decompressed_bytes)"
                    )
                is_at_end = len(text) < limit or text.endswith(b"\n")
                if not is_inside and is_at_end:
                    yield text
                elif not is_inside:
                    yield self._make_length_error("line")
                is_inside = not is_at_end
                number += is_at_end

    def _read_whole(self, content: IO[bytes]) -> bytes | ValueError:
        """Return the whole content; an error if it is damaged or too long. Reads no more than the limit."""
        limit = self._max_line_bytes + 1
        found = bytearray()  # `read` would reserve memory for the limit at once
        try:
            while len(found) < limit and (piece := content.read(min(_BUFFER, limit - len(found)))):
                found += piece
        except Exception as error:  # each decompressor has its own exceptions
            return ValueError(f"cannot decompress: {error}")
        return self._make_length_error("file") if len(found) == limit else bytes(found)

    def _make_length_error(self, kind: str) -> ValueError:
        return ValueError(f"the {kind} has more than {self._max_line_bytes:,} bytes (max_line_bytes)")


def _describe_csv(text: bytes) -> str | None:
    """Return what to do with a file of comma-separated values; None if the first line is not of one."""
    try:
        line = text.partition(b"\n")[0].decode().strip()
    except UnicodeDecodeError:
        return None
    if "," not in line or line.startswith(("{", "[")):
        return None
    return (
        f"this is CSV, with the columns {line[:200]}; kv-pool trace convert --from csv reads lengths of "
        "prompts and outputs from it"
    )
