"""Text from outside is escaped before it reaches a terminal."""

import json
import unicodedata

import pytest

from kv_pool.cli.foreign_text import escape_json, escape_lines, escape_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GPU", "GPU"),
        ("été 漢字 🙂", "été 漢字 🙂"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\rc\td\0", r"a\x0ab\x0dc\x09d\x00"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\ud800", r"\ud800"),
        ("\U000e0001", r"\U000e0001"),
        ("[/x]", "[/x]"),
    ],
)
def test_escaped_text_is_one_printable_line(text, shown):
    assert escape_text(text) == shown


@pytest.mark.slow
def test_no_unprintable_character_is_kept():
    every = "".join(map(chr, range(0x110000)))
    escaped = escape_text(every, len(every))
    assert not {unicodedata.category(one) for one in escaped} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def test_long_text_is_cut_and_shows_its_length():
    assert escape_text("x" * 10_000, 3) == "xxx... (10000 characters)"
    assert escape_text("x" * 10_000, 300) == "x" * 300 + "... (10000 characters)"
    assert len(escape_text("\x1b" * 10_000)) < 1000


def test_messages_keep_their_line_ends():
    assert escape_lines("one\n\x1b[1mtwo\n") == "one\n\\x1b[1mtwo\n"


def test_escaped_json_decodes_to_the_same_value():
    value = {"medium": "".join(map(chr, [*range(0x300), 0x202E, 0xE0001, 0x1F642])), "number": 1}
    escaped = escape_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(escaped) == value
    assert all(line.isprintable() for line in escaped.split("\n"))
