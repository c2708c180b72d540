"""The log of a command: text or lines of JSON on standard error, which a terminal shows as they are."""

import json
import logging
import subprocess
import sys

import pytest
from cli.kv_pool_command import kv_pool_command
from lab.made_trace import record, write_trace

from kv_pool.cli.logs import LogOptions
from kv_pool.cli.sub_commands import COMMANDS, make_command
from kv_pool.loggers import get_logger

HOSTILE = "\x1b]0;title\x07\x7f\u202e\ud800"


@pytest.fixture
def log(capsys):
    """Return a function that logs something in a format and at a level, and returns standard error."""
    levels = {name: logging.getLogger(name).level for name in ("", "kv_pool")}

    def log(act, *options):
        root = logging.getLogger()
        handlers = list(root.handlers)  # pytest's: its workers cannot report a lone surrogate
        root.handlers.clear()
        LogOptions(*options).apply()
        act(get_logger("kv_pool.events.sockets"))
        root.handlers[:] = handlers
        return capsys.readouterr().err

    yield log
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def fail(logger):
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("failed at %s", HOSTILE, extra={"node": HOSTILE, "blocks": 3})


def test_a_line_of_json_has_the_fields_of_the_record(log):
    printed = log(fail, "json")
    assert printed.rstrip("\n").isprintable()
    found = json.loads(printed)
    assert found.pop("time").endswith("+00:00")
    *_, last = found.pop("exception").splitlines()
    assert last == f"ValueError: {HOSTILE}"
    assert found == {
        "level": "error",
        "logger": "kv_pool.events",
        "message": f"failed at {HOSTILE}",
        "node": HOSTILE,
        "blocks": 3,
    }


def test_text_has_the_traceback_and_no_control_characters(log):
    first, *_, last = log(fail, "text").splitlines()
    assert first == r"error: failed at \x1b]0;title\x07\x7f\u202e\ud800"
    assert last == r"ValueError: \x1b]0;title\x07\x7f\u202e\ud800"


@pytest.mark.parametrize(
    "value", [float("nan"), {("a", 1): 2}, object, b"\xff"], ids=["NaN", "keys", "type", "bytes"]
)
def test_a_field_that_json_lacks_is_text(log, value):
    assert json.loads(log(lambda logger: logger.error("x", extra={"value": value}), "json"))["value"] == str(
        value
    )


def test_the_level_is_the_least_that_is_printed_and_of_other_libraries_it_stays(log):
    def act(logger):
        for one in (logger, logging.getLogger("another")):
            one.info("of %s", one.name)
            one.warning("of %s", one.name)

    assert (
        log(act, "text", "info")
        == "note: of kv_pool.events\nwarning: of kv_pool.events\nwarning: of another\n"
    )
    assert log(act, "text", "critical") == "warning: of another\n"


@pytest.mark.parametrize("command", [*COMMANDS, "trace info", "trace generate chat"])
def test_every_command_has_the_options(command):
    found = make_command("0", command.split()[:1])
    for word in command.split():
        found = found.commands[word]
    if not hasattr(found, "commands"):
        assert [option.name for option in found.params][-2:] == ["log_format", "log_level"]


def test_warnings_and_errors_of_a_command_are_lines_of_json(tmp_path):
    """The times are since 1970, and the second trace does not exist."""
    lines = [record(24, [1, 2, 3], 5, timestamp=1_790_000_000 + number) for number in range(300)]
    write_trace(tmp_path / "trace.jsonl", lines)
    replay = ("replay", "trace.jsonl", "--blocks", "20", "--trace-block-size", "8", "--timestamp-unit", "s")
    for path, status in (("trace.jsonl", 0), (f"no{HOSTILE[:3]}.jsonl", 2)):
        done = kv_pool_command("replay", path, *replay[2:], "--log-format", "json", cwd=tmp_path)
        assert done.returncode == status, done.stderr
        found = [json.loads(line) for line in done.stderr.splitlines()]
        assert [(one["level"], one["logger"]) for one in found] == [
            ("error", "kv_pool.cli") if status else ("warning", "kv_pool.lab")
        ]
        assert path in found[0]["message"]
    done = kv_pool_command(*replay, "--log-level", "loud", cwd=tmp_path)
    assert (done.returncode, done.stderr.partition(";")[0]) == (2, "error: unknown log_level 'loud'")


def test_the_library_logs_by_package_and_adds_no_handlers():
    code = """
import importlib, logging, pkgutil, kv_pool
for room in ("contiguous", "control", "events", "migration", "tiers"):
    package = importlib.import_module(f"kv_pool.{room}")
    for module in pkgutil.iter_modules(package.__path__, f"kv_pool.{room}."):
        importlib.import_module(module.name)
found = {name: one for name, one in logging.root.manager.loggerDict.items() if name.startswith("kv_pool.")}
print(*found, *logging.root.handlers, *(one.handlers for one in found.values() if one.handlers))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    rooms = ("contiguous", "control", "events", "migration", "tiers")
    assert sorted(done.stdout.split()) == [f"kv_pool.{room}" for room in rooms]
