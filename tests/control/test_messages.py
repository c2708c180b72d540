"""Commands and replies: encoding, decoding, and errors for invalid lines."""

from urllib.parse import parse_qsl

import pytest

from kv_pool import ControlError, CopyFailedError, InvalidArgumentError
from kv_pool.control.messages import (
    CancelCommand,
    DefragCommand,
    DefragReport,
    HoldsCommand,
    LayoutCommand,
    MigrateCommand,
    MigrationsCommand,
    PeersCommand,
    SequencesCommand,
    StatsCommand,
    TiersCommand,
    decode_answer,
    decode_command,
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
        HoldsCommand(7),
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
    target, body = encode_command(command)
    name, _, query = target.removeprefix("/v1/").partition("?")
    assert decode_command(name, dict(parse_qsl(query)) if body is None else body) == command


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("defrag", b"max_moves=1", "JSON is malformed"),
        ("defrag", b'{"max_moves": 0}', r"max_moves.*; known are max_moves, max_evictions"),
        ("migrate", b'{"target": 7}', "target"),
        ("migrate", b'{"target": "b", "max_bytes_per_s": -1}', "max_bytes_per_s"),
        ("defrag", b'{"max_evictions": -1}', "max_evictions"),
        ("defrag", b'{"max_moves": "all"}', "max_moves"),
        ("cancel", b"", "missing required field `migration_id`"),
        ("cancel", b'{"migration_id": "\xff"}', "the arguments of cancel are not valid"),
        ("stats", {"verbose": "1"}, "verbose.*; it takes none"),
        ("holds", {"block_id": "one"}, "block_id"),
    ],
)
def test_invalid_command_error_says_why(name, arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        decode_command(name, arguments)


def test_result_survives_encoding_and_decoding():
    assert decode_answer(200, encode_result(REPORT), DefragReport) == REPORT


@pytest.mark.parametrize("kind", [ControlError, CopyFailedError, InvalidArgumentError])
def test_kv_pool_error_keeps_its_class(kind):
    with pytest.raises(kind, match="what went wrong") as raised:
        decode_answer(*encode_error(kind("what went wrong")), DefragReport)
    assert type(raised.value) is kind


def test_foreign_error_becomes_a_control_error():
    with pytest.raises(ControlError, match="the pool raised ZeroDivisionError: by nothing"):
        decode_answer(*encode_error(ZeroDivisionError("by nothing")), DefragReport)


@pytest.mark.parametrize("name", ["SystemExit", "annotations", "Nonsense"])
def test_error_with_an_unknown_name_becomes_a_control_error(name):
    with pytest.raises(ControlError, match="why"):
        decode_answer(409, b'{"error": "%s", "message": "why"}' % name.encode(), DefragReport)


@pytest.mark.parametrize("body", [b"hello", b"[]", b"{}", b'{"moved_blocks": "many"}'])
@pytest.mark.parametrize("status", [200, 404])
def test_invalid_answer_error_mentions_another_version(status, body):
    with pytest.raises(ControlError, match="another version"):
        decode_answer(status, body, DefragReport)
