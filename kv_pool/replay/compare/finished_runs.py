"""`FinishedRuns`: the results of an unfinished comparison in a file, so that a later call continues it."""

import os
from contextlib import suppress
from typing import BinaryIO

import msgspec

from kv_pool.errors import TraceError
from kv_pool.replay.compare.policy_run import PolicyRun
from kv_pool.replay.compare.references import References

Result = PolicyRun | References


class _Line(msgspec.Struct, frozen=True):
    """A line of the file. The key is a digest of all that decides the result."""

    key: str
    result: Result


class FinishedRuns:
    """The results in a file of JSON lines. Lines that cannot be read, such as a truncated last one, count as
    not finished.

    Args:
        path: the file; None keeps the results in memory only.
    Raises:
        TraceError: the file cannot be read or created.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._results: dict[str, Result] = {}
        if path is None:
            return
        decode = msgspec.json.Decoder(_Line).decode
        try:
            self._file = open(path, "a+b")  # noqa: SIM115, closed by `close`
            self._file.seek(0)
            text = self._file.read()
            for line in text.splitlines():
                with suppress(msgspec.MsgspecError, RecursionError):
                    found = decode(line)
                    self._results[found.key] = found.result
            if text and not text.endswith(b"\n"):
                self._file.write(b"\n")
        except OSError as error:
            self.close()
            raise TraceError(f"{path}: cannot keep finished runs: {error.strerror}") from error

    def find(self, key: str) -> Result | None:
        """Return the result with this key, or None."""
        return self._results.get(key)

    def add(self, key: str, result: Result) -> None:
        """Keep a result, and write it to the file at once. Raises TraceError."""
        self._results[key] = result
        if self._file is not None:
            try:
                self._file.write(msgspec.json.encode(_Line(key, result)) + b"\n")
                self._file.flush()
            except OSError as error:
                raise TraceError(f"{self._path}: cannot keep finished runs: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # what was not written has raised in `add`
                self._file.close()
            self._file = None

    def delete(self) -> None:
        """Close and delete the file."""
        self.close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)
