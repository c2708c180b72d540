"""The `kv_pool` object of a request: what is accepted, what is refused, and random JSON."""

import json
import random

import msgspec
import pytest

from kv_pool import InvalidArgumentError, RetentionDirective
from kv_pool.integrations.vllm.request_options.options import (
    MAX_DURATION_MS,
    MAX_RANGES,
    MAX_TEXT,
    RequestOptions,
    make_refusal,
    read_options,
)

SYSTEM_PROMPT = {"token_start": 0, "token_end": 1200, "priority": 80, "duration_ms": 300_000}
PIN = {"token_end": 64, "duration_ms": 1000, "pin": True}


def test_ranges_become_directives():
    options = read_options(
        {"token_range_retention_configs": [SYSTEM_PROMPT, {"token_start": 1200, "priority": 1}]}
    )
    assert options.list_directives(2000) == [
        RetentionDirective(0, 1200, 80, 300.0),
        RetentionDirective(1200, None, 1),
    ]
    assert options.list_changes() == []


def test_decode_priority_begins_behind_the_prompt():
    options = read_options({"decode_retention_priority": 10, "decode_duration_ms": 1500})
    assert options.list_directives(77) == [RetentionDirective(77, None, 10, 1.5)]


def test_changes_are_listed_weakest_first():
    options = read_options(
        {"change": [PIN], "demote": [{"token_start": 8}], "release": True, "end_session": "user-17"}
    )
    assert options.list_changes() == [
        RetentionDirective(0, None),
        RetentionDirective(8, None, 0),
        RetentionDirective(0, 64, duration_s=1.0, pin=True),
    ]
    assert read_options({"demote": True}).list_changes() == [RetentionDirective(priority=0)]
    assert read_options({"demote": False}) == RequestOptions()


REFUSED = [
    (None, "Expected `object`, got `null`"),
    ("{", "truncated"),
    ("[1]", "Expected `object`"),
    ('"\ud800"', "surrogates"),
    ({"token_range": []}, "unknown field `token_range`"),
    ({"token_range_retention_configs": []}, r"length >= 1 - at `\$.token_range_retention_configs`"),
    ({"token_range_retention_configs": [SYSTEM_PROMPT] * (MAX_RANGES + 1)}, "length <= 64"),
    ({"change": [{**SYSTEM_PROMPT, "priority": 101}]}, r"<= 100 - at `\$.change\[0\].priority`"),
    ({"change": [{**SYSTEM_PROMPT, "priority": 80.0}]}, "Expected `int`, got `float`"),
    ({"change": [{**SYSTEM_PROMPT, "token_start": -1}]}, ">= 0"),
    ({"change": [{**SYSTEM_PROMPT, "token_start": 1200}]}, "tokens 1200 to 1200 are none"),
    ({"change": [{**SYSTEM_PROMPT, "token_end": 2**31}]}, "<= 2147483647"),
    ({"change": [{**SYSTEM_PROMPT, "duration_ms": 0}]}, ">= 1"),
    ({"change": [{**SYSTEM_PROMPT, "duration_ms": MAX_DURATION_MS + 1}]}, "<= 604800000"),
    ({"change": [{"token_end": 9}]}, "the range has no effect"),
    ({"change": [{**PIN, "token_end": None}]}, "a pin needs token_end and duration_ms"),
    ({"change": [{**PIN, "duration_ms": None}]}, "a pin needs token_end and duration_ms"),
    ({"change": [{**PIN, "priority": 90}]}, "a pinned range has no priority"),
    ({"demote": [{"token_start": 0, "priority": 3}]}, "unknown field `priority`"),
    ({"release": 1}, "Expected `bool . array`"),
    ({"session": {"id": "", "duration_ms": 1}}, "length >= 1"),
    ({"session": {"id": "x" * 257, "duration_ms": 1}}, "length <= 256"),
    ({"session": {"id": "a\nb", "duration_ms": 1}}, "cannot be printed"),
    ({"end_session": "\ud800"}, "cannot be printed"),
    ({"decode_duration_ms": 5}, "needs decode_retention_priority"),
    ({"hints": {}}, "length >= 1"),
    ({"hints": {f"hint {number}": 1 for number in range(17)}}, "length <= 16"),
    ({"hints": {"x" * 65: 1}}, "length <= 64"),
    ({"hints": {"a\nb": 1}}, "cannot be printed"),
    ({"hints": {"mine": "a\nb"}}, "cannot be printed"),
    ({"hints": {"mine": "x" * 257}}, "length <= 256"),
    ({"hints": {"mine": 10**40}}, "hints: mine is beyond"),
    ({"hints": {"mine": float("nan")}}, "hints: mine is beyond"),
    ({"hints": {"ttl_s": "20"}}, r"hints: Expected `float`, got `str` - at `\$.ttl_s`"),
    ({"hints": {"ttl_s": -1}}, ">= 0"),
    ({"hints": {"ttl_s": 604_801}}, "<= 604800"),
    ({"hints": {"session_id": ""}}, "length >= 1"),
    (" " * (MAX_TEXT + 1), "has 65537 characters"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refused(value, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_options(value)
    assert str(caught.value).startswith("kv_pool: ")


def test_depth_is_refused():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for value in ({"change": nested}, {"change": [{"token_end": nested}]}, "[" * 60_000):
        with pytest.raises(InvalidArgumentError):
            read_options(value)


def test_refusal_is_short_printable_ascii():
    refusal = make_refusal(ValueError("é\n\x00\ud800" + "x" * 10_000))
    assert refusal.startswith("kv_pool: \\xe9  \\ud800xxx")
    assert len(refusal) == 400
    assert make_refusal(ValueError(refusal)) == refusal


NUMBERS = [0, 1, 35, 36, 100, 101, -1, 2**31, 2**63, 10**30, 0.5, 1e308, True, None]
WORDS = ["", "kv_pool", "user-17", "\ud800", "\x00", "x" * 300, "[{", "null"]


def make_value(rng, depth=0):
    kinds = ["number", "word"] if depth > 3 else ["number", "word", "list", "object", "object"]
    kind = rng.choice(kinds)
    if kind == "number":
        return rng.choice(NUMBERS)
    if kind == "word":
        return rng.choice(WORDS)
    if kind == "list":
        return [make_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 70]) if depth < 2 else 1)]
    return {make_name(rng): make_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def make_name(rng):
    others = ("token_start", "token_end", "priority", "duration_ms", "pin", "id", "ttl_s", "category")
    fields = [*RequestOptions.__struct_fields__, *others]
    return rng.choice([*fields, rng.choice(WORDS)])


def damage(rng, value):
    """Replace one part of a valid object by a random value."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], damage(rng, value[index]), *value[index + 1 :]]
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        return {**value, name: damage(rng, value[name])}
    return make_value(rng)


VALID = {
    "token_range_retention_configs": [SYSTEM_PROMPT, PIN],
    "decode_retention_priority": 3,
    "session": {"id": "user-17", "duration_ms": 1000, "priority": 50},
    "change": [PIN],
    "demote": [{"token_start": 1}],
    "release": True,
    "end_session": "user-18",
    "hints": {"ttl_s": 20, "category": "agent", "mine": True, "ratio": 0.5},
}


def test_valid_options_are_kept_as_sent():
    for sent in (VALID, json.dumps(VALID), json.dumps(VALID).encode()):
        kept = msgspec.to_builtins(read_options(sent))
        assert {name: kept[name] for name in ("release", "end_session", "session", "hints")} == {
            name: VALID[name] for name in ("release", "end_session", "session", "hints")
        }


@pytest.mark.parametrize("seed", range(20))
def test_any_json_is_read_or_refused(seed):
    rng = random.Random(seed)
    num_read = 0
    refusals = []
    for _ in range(300):
        value = make_value(rng) if rng.random() < 0.3 else damage(rng, VALID)
        sent = value
        if rng.random() < 0.3:
            sent = json.dumps(value)
            if rng.random() < 0.5:
                sent = sent.encode()
            if rng.random() < 0.3:
                sent = sent[: rng.randrange(len(sent) + 1)]
        try:
            options = read_options(sent)
        except InvalidArgumentError as error:
            refusals.append(str(error))
            continue
        num_read += 1
        assert isinstance(options, RequestOptions)
        for directive in [*options.list_directives(10), *options.list_changes()]:
            assert 0 <= directive.priority <= 100
        assert read_options(msgspec.to_builtins(options)) == options
    assert num_read > 3
    assert all(text.isascii() and text.isprintable() and len(text) <= 400 for text in refusals)
