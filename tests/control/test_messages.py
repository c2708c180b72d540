"""Commands and replies: encoding, decoding, and errors for invalid lines."""

import pytest

from kv_pool import ControlError, CopyFailedError, InvalidArgumentError
from kv_pool.control.messages import (
    CancelCommand,
    DefragCommand,
    DefragReport,
    LayoutCommand,
    MigrateCommand,
    MigrationsCommand,
    PeersCommand,
    SequencesCommand,
    StatsCommand,
    TiersCommand,
    decode_command,
    decode_reply,
    encode_command,
    encode_error,
    encode_result,
)

REPORT = DefragReport(127, 3.2, 0.085, 0.021, 16)


@pytest.mark.parametrize(
    "command",
    [
        StatsCommand(),
        DefragCommand(),
        DefragCommand(max_moves=7, max_evictions=3),
        LayoutCommand(),
        SequencesCommand(),
        TiersCommand(),
        MigrateCommand("b"),
        MigrateCommand("b", 7, False, 1e6),
        MigrateCommand(None, 7, backend="tcp"),
        MigrationsCommand(),
        MigrationsCommand("0123"),
        CancelCommand("0123"),
        PeersCommand(),
    ],
)
def test_command_survives_encoding_and_decoding(command):
    line = encode_command(command)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_command(line) == command


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"stats\n", "a command is one line of JSON such as"),
        (b'{"order": "stats"}\n', "missing required field `command`"),
        (b'{"command": "stop"}\n', "unknown command 'stop'; known are stats, defrag, layout"),
        (b'{"command": "defrag", "max_moves": 0}\n', "max_moves"),
        (b'{"command": "migrate", "target": 7}\n', "target"),
        (b'{"command": "migrate", "target": "b", "max_bytes_per_s": -1}\n', "max_bytes_per_s"),
        (b'{"command": "defrag", "max_evictions": -1}\n', "max_evictions"),
        (b'{"command": "defrag", "max_moves": "all"}\n', "max_moves"),
        (b'{"command": "stats", "verbose": true}\n', "verbose"),
        (b'{"command": "st\xff\xfe"}\n', "a command is one line of JSON such as"),
    ],
)
def test_invalid_command_error_says_why(line, message):
    with pytest.raises(ControlError, match=message):
        decode_command(line)


def test_result_survives_encoding_and_decoding():
    assert decode_reply(encode_result(REPORT), DefragReport) == REPORT


@pytest.mark.parametrize("kind", [ControlError, CopyFailedError, InvalidArgumentError])
def test_kv_pool_error_keeps_its_class(kind):
    with pytest.raises(kind, match="what went wrong") as raised:
        decode_reply(encode_error(kind("what went wrong")), DefragReport)
    assert type(raised.value) is kind


def test_foreign_error_becomes_a_control_error():
    with pytest.raises(ControlError, match="the pool raised ZeroDivisionError: by nothing"):
        decode_reply(encode_error(ZeroDivisionError("by nothing")), DefragReport)


@pytest.mark.parametrize("name", ["SystemExit", "annotations", "Nonsense"])
def test_error_with_an_unknown_name_becomes_a_control_error(name):
    with pytest.raises(ControlError, match="why"):
        decode_reply(b'{"error": "%s", "message": "why"}\n' % name.encode(), DefragReport)


@pytest.mark.parametrize("line", [b"hello\n", b"[]\n", b"{}\n", b'{"result": {"moved_blocks": "many"}}\n'])
def test_invalid_reply_error_mentions_another_version(line):
    with pytest.raises(ControlError, match="another version"):
        decode_reply(line, DefragReport)
