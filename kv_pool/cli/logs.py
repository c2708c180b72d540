"""`--log-format` and `--log-level`: what the commands log, on standard error, as text or as lines of JSON."""

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from kv_pool.cli.foreign_text import escape_json, escape_lines
from kv_pool.option import check_options, setting

_FORMATS = ("text", "json")
_LEVELS = ("debug", "info", "warning", "error", "critical")

_PLAIN = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_PANEL = "Log and errors, on standard error"


class TextLines(logging.Formatter):
    """A format for people: `warning: ...`, with the traceback of an exception in further lines."""

    def format(self, record: logging.LogRecord) -> str:
        level = "note" if record.levelno == logging.INFO else record.levelname.lower()
        return escape_lines(f"{level}: {super().format(record)}")


class JSONLines(logging.Formatter):
    """A format for programs: one JSON object per record, with characters that do not print escaped.

    Its fields are `time` (UTC, ISO 8601), `level`, `logger`, `message`, `exception` if there is one (the
    traceback), and those of `extra=`. If JSON cannot represent one of them, such as NaN, all fields are text.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _PLAIN} | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        try:
            line = json.dumps(fields, default=str, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError):
            line = json.dumps({name: str(value) for name, value in fields.items()}, ensure_ascii=False)
        return escape_json(line)


class _StandardError(logging.Handler):
    """A handler for `sys.stderr`, also while a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)


_handler = _StandardError()
_handler.setFormatter(TextLines())


def print_record(level: int, message: str) -> None:
    """Print a message of the command itself in the format of the log, whatever the level of the log."""
    _handler.handle(logging.LogRecord("kv_pool.cli", level, "", 0, message, None, None))


@dataclass(frozen=True)
class LogOptions:
    """The log of a command."""

    log_format: str = setting(
        "The format: text, or json lines.", default="text", choices=_FORMATS, panel=_PANEL
    )
    log_level: str = setting(
        "The least severe: " + ", ".join(_LEVELS) + ".", default="warning", choices=_LEVELS, panel=_PANEL
    )

    def apply(self) -> None:
        """Print what is logged from now on; of other libraries, warnings and above.

        Raises:
            InvalidArgumentError: an option has none of its values.
        """
        check_options(self)
        _handler.setFormatter(JSONLines() if self.log_format == "json" else TextLines())
        logging.getLogger().addHandler(_handler)  # no-op if it has it
        logging.getLogger("kv_pool").setLevel(self.log_level.upper())
