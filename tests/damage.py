"""Invalid bytes for decoders: damaged at random, or crafted with valid framing."""

import msgspec

NASTY = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64 - 1,
    -(2**63),
    1e308,
    float("nan"),
    "",
    "x" * 300,
    b"",
    b"\xff" * 40,
    [],
    {},
    [[]],
    {"type": "PullSubject"},
)


class Raw(bytes):
    """Bytes that are inserted as an encoded value without change."""


NASTY_RAW = (
    Raw(b"\xa2\xff\xfe"),  # text that is not UTF-8
    Raw(b"\xa3\xed\xa0\x80"),  # a lone surrogate
    Raw(b"\x91" * 5000 + b"\xc0"),  # nested too deeply
    Raw(b"\x81\xa1a" * 5000 + b"\xc0"),
    Raw(b"\xdd\xff\xff\xff\xff"),  # an array of 4 billion
    Raw(b"\xc6\xff\xff\xff\xff"),  # bytes, 4 billion
    Raw(b"\xc1"),
    Raw(b"\xc7\x0c\xff" + b"\xff" * 12),  # an invalid timestamp
)


def damage(rng, data):
    """Return the bytes with some flipped, cut off, repeated, removed or inserted."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[place % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 9))
            case 3:
                del data[place : place + rng.randint(1, 9)]
            case 4:
                data[place:place] = data[: rng.randint(0, 30)]
            case _:
                data[place:place] = rng.choice(NASTY_RAW)
    return bytes(data)


def craft(rng, data):
    """Return the msgpack data with one value replaced, removed or doubled."""
    try:
        value = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):  # already damaged
        return damage(rng, data)
    places = list(_list_places(value, []))
    return _pack(_change(rng, value, rng.choice(places)))


def craft_or_damage(rng, data):
    return craft(rng, data) if rng.random() < 0.7 else damage(rng, data)


def _list_places(value, place):
    yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _list_places(inner, [*place, key])
    elif isinstance(value, list):
        for index, inner in enumerate(value[:20]):
            yield from _list_places(inner, [*place, index])


def _change(rng, value, place):
    if not place:
        return rng.choice(NASTY + NASTY_RAW)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if len(place) == 1 and rng.random() < 0.2:
        if isinstance(changed, list) and rng.random() < 0.5:
            changed.append(changed[place[0]])
        else:
            del changed[place[0]]
    else:
        changed[place[0]] = _change(rng, value[place[0]], place[1:])
    return changed


def _pack(value):
    """Encode as msgpack; `Raw` bytes are inserted unchanged."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, dict):
        return (
            b"\xdf" + len(value).to_bytes(4, "big") + b"".join(_pack(k) + _pack(v) for k, v in value.items())
        )
    if isinstance(value, list):
        return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(map(_pack, value))
    return msgspec.msgpack.encode(value)
