"""Damaged messages over the control socket are typed errors in both directions."""

import random
from contextlib import suppress

import pytest
from damage import damage

from kv_pool import KVPoolError
from kv_pool.control.messages import (
    CancelCommand,
    DefragCommand,
    DefragReport,
    MigrateCommand,
    MigrationsCommand,
    decode_answer,
    decode_command,
    encode_command,
    encode_error,
    encode_result,
)
from kv_pool.errors import ControlError, InvalidArgumentError
from kv_pool.reports import SequenceList, SequenceReport

COMMANDS = [DefragCommand(3, 4), MigrateCommand("b", 7, True, 2.0), CancelCommand("ab")]
ANSWERS = [
    (200, encode_result(DefragReport(127, 3.2, 0.085, 0.021, 16))),
    (200, encode_result(SequenceList([SequenceReport(1, 2, 1, 0.5, False)]))),
    encode_error(ControlError("because")),
]
NASTY = [b"[" * 20_000, b'"\\ud800"', b"\xff", b"1e999", b"9" * 400, b'{"a":' * 20_000, b"null", b"-1"]


def spoil(rng, line):
    if rng.random() < 0.6:
        parts = line.split(b":")
        place = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
        parts[place] = rng.choice(NASTY) + rng.choice([b"", b",", b"}", parts[place]])
        return b":".join(parts)
    return damage(rng, line)


@pytest.mark.parametrize("seed", range(30))
def test_damaged_commands_and_replies_are_typed_errors(seed):
    rng = random.Random(seed)
    for _ in range(100):
        with suppress(KVPoolError):
            target, body = encode_command(rng.choice(COMMANDS))
            encode_command(decode_command(target.removeprefix("/v1/"), spoil(rng, body)))
        with suppress(KVPoolError):
            status, body = rng.choice(ANSWERS)
            decode_answer(status, spoil(rng, body), rng.choice([DefragReport, SequenceList]))


def test_text_that_json_cannot_represent_is_a_typed_error():
    with pytest.raises(InvalidArgumentError, match="cannot be sent"):
        encode_command(CancelCommand("\ud800"))
    with pytest.raises(InvalidArgumentError, match="cannot be sent"):
        encode_command(MigrationsCommand("\ud800"))
    with pytest.raises(InvalidArgumentError, match="the reply cannot be sent"):
        encode_result(SequenceList([SequenceReport("\ud800", 2, 1, 0.5, False)]))
    with pytest.raises(ControlError, match=r"no \\ud800 here"):
        decode_answer(*encode_error(ControlError("no \ud800 here")), DefragReport)


@pytest.mark.parametrize("start", [b'{"migration_id": ', b'{"x": ', b""])
def test_deeply_nested_lists_are_refused(start):
    with pytest.raises(InvalidArgumentError, match="the arguments of cancel are not valid"):
        decode_command("cancel", start + b"[" * 3000)
