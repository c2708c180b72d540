"""Decompresses files as streams, in bounded memory."""

import gzip
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO

from kv_pool.errors import TraceError, describe_install

XZ_MEMORY_LIMIT = 256 << 20
"""Memory limit in bytes for decompressing .xz; `xz -9` needs 65 MiB, the format allows 4 GiB."""

_CHUNK = 1 << 16
_BUFFER = 1 << 20


class _XzContent:
    """The content of a .xz file, decompressed like `lzma.open`, with a memory limit.

    Raises:
        lzma.LZMAError: the data is damaged, or needs more memory than `XZ_MEMORY_LIMIT`.
        EOFError: the data ends inside a stream.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_LIMIT)

    def read1(self, max_bytes: int) -> bytes:
        """Return the bytes of at most one decoder step; b"" at the end."""
        while True:
            data = b""
            if self._decoder.eof:
                # Another stream may follow, after zeros that pad to four bytes.
                data = self._decoder.unused_data.lstrip(b"\0")
                while not data:
                    if not (chunk := self._raw.read(_CHUNK)):
                        return b""
                    data = chunk.lstrip(b"\0")
                self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, XZ_MEMORY_LIMIT)
            elif self._decoder.needs_input:
                data = self._raw.read(_CHUNK)
                if not data:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            if found := self._decoder.decompress(data, max_bytes):
                return found


class _Pieces(RawIOBase):
    """The content of a decompressor, as far as each of its steps gives: what comes before damage is read."""

    def __init__(self, read_once: Callable[[int], bytes]) -> None:
        self._read_once = read_once

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]  # typeshed: Buffer
        found = self._read_once(len(buffer))
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
    if magic[:2] == b"\x1f\x8b":
        with gzip.open(raw) as content:
            yield BufferedReader(_Pieces(content.read1), _BUFFER)
    elif magic == b"\xfd7zXZ\x00":
        yield BufferedReader(_Pieces(_XzContent(raw).read1), _BUFFER)
    elif magic[:4] == b"\x28\xb5\x2f\xfd":
        try:
            from backports import zstd
        except ImportError as error:
            raise TraceError(
                f"{path}: reading .zst needs backports.zstd: {describe_install('lab')}"
            ) from error
        with zstd.open(raw) as content:
            yield BufferedReader(_Pieces(content.read1), _BUFFER)
    else:
        yield raw
