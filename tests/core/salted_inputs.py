"""Inputs of hashes as plain values, requests made of them, and small changes of them.

An input is a dict: tokens, regions ((start, salt), ...), adapter (name, path) or None, media ((identifier,
offset, length), ...), cache_salt or None.
"""

from types import SimpleNamespace

from kv_pool import LoRARequest, MultiModalFeature, PlaceholderRange

BLOCK_SIZE = 4


def make_salted(given):
    """Return a request of an engine's own class with this input, without hashes."""
    adapter = given["adapter"]
    return SimpleNamespace(
        block_hashes=[],
        all_token_ids=given["tokens"],
        lora_request=adapter and LoRARequest(1, *adapter),
        mm_features=[
            MultiModalFeature(name, PlaceholderRange(offset, length))
            for name, offset, length in given["media"]
        ],
        cache_salt=given["cache_salt"],
        salt_regions=tuple(SimpleNamespace(start=start, salt=salt) for start, salt in given["regions"]),
    )


def describe(given):
    """Return what the full blocks of an input contain, as text with types: equal texts are equal inputs.

    Tokens after the last full block, and media and regions that start there, are not part of any block.
    """
    end = len(given["tokens"]) // BLOCK_SIZE * BLOCK_SIZE
    return repr(
        (
            list(given["tokens"][:end]),
            [region for region in given["regions"] if region[0] < end],
            given["adapter"],
            sorted((one for one in given["media"] if one[1] < end), key=lambda one: one[1]),
            given["cache_salt"],
        )
    )


def describe_as_vllm(given):
    """Return `describe` of an input without regions, less what vLLM's keys do not cover.

    They cover the blocks that a medium overlaps, and not its length; an empty salt is no salt.
    """
    by_offset = sorted(given["media"], key=lambda one: one[1])
    overlaps = [
        [
            (identifier, offset)
            for identifier, offset, length in by_offset
            if offset < start + BLOCK_SIZE and offset + length > start
        ]
        for start in range(0, len(given["tokens"]) - BLOCK_SIZE + 1, BLOCK_SIZE)
    ]
    rest = describe({**given, "media": [], "cache_salt": given["cache_salt"] or None})
    return f"{rest} {overlaps}" if any(overlaps) else rest


def draw_input(rng):
    """Return a random input with at least one region, of few and short texts."""
    end = rng.randrange(BLOCK_SIZE, 5 * BLOCK_SIZE)
    starts = sorted(rng.sample(range(end), rng.choice([1, 1, 2, 3])))
    return {
        "tokens": [draw_token(rng) for _ in range(end)],
        "regions": [(start, draw_text(rng)) for start in starts],
        "adapter": rng.choice([None, (draw_text(rng), draw_text(rng))]),
        "media": [draw_medium(rng, end) for _ in range(rng.choice([0, 0, 1, 2]))],
        "cache_salt": rng.choice([None, None, draw_text(rng)]),
    }


def draw_token(rng):
    return rng.choice([0, 1, 23, 24, 255, 256, 0x61, 2**16, 2**32 - 1, 2**64 - 1])


def draw_text(rng):
    return rng.choice(["a", "b", "ab", "ba", "1", "\0", "cache_salt", "media", "a\0b", "é", "e\u0301"])


def draw_medium(rng, end):
    identifier = draw_text(rng)
    if rng.random() < 0.3:
        identifier = identifier.encode()
    return (identifier, rng.randrange(end), rng.randrange(2 * BLOCK_SIZE))


def change(given, rng):
    """Return the input with one change of a type, of the nesting or of a boundary; it may be equal."""
    changed = {**given, "tokens": list(given["tokens"])}
    regions, media = list(given["regions"]), list(given["media"])
    name, path = given["adapter"] or ("a", "b")
    end = len(given["tokens"])
    kind = rng.randrange(18)
    at = rng.randrange(len(regions))
    start, salt = regions[at]
    if kind == 0:
        changed["tokens"][rng.randrange(end)] = draw_token(rng)
    elif kind == 1:
        first, second = rng.randrange(end), rng.randrange(end)
        tokens = changed["tokens"]
        tokens[first], tokens[second] = tokens[second], tokens[first]
    elif kind == 2:  # the region's border
        regions[at] = (start + rng.choice([-1, 1, BLOCK_SIZE]), salt)
    elif kind == 3:
        regions[at] = (start, salt + rng.choice(["\0", "a", " "]))
    elif kind == 4:  # one region becomes two of the same salt, or two become one
        if len(regions) > 1:
            del regions[at]
        else:
            regions.append((start + rng.randrange(1, 6), salt))
    elif kind == 5 and len(regions) > 1:  # exchange salts
        other = (at + 1) % len(regions)
        regions[at], regions[other] = (start, regions[other][1]), (regions[other][0], salt)
    elif kind == 6:  # a salt between vLLM's field and a region
        if given["cache_salt"] is None:
            changed["cache_salt"] = salt
        else:
            changed["cache_salt"] = None
            regions = [(0, given["cache_salt"]), *((one, text) for one, text in regions if one)]
    elif kind == 7:  # text between adapter and salt
        changed["adapter"] = (salt, path)
        regions[at] = (start, name)
    elif kind == 8:  # the boundary between two texts
        changed["adapter"] = (name + path[:1], path[1:])
    elif kind == 9:
        changed["adapter"] = rng.choice([None, (path, name), (name, ""), ("", path)])
    elif kind == 10:  # a salt as a medium, and the reverse
        media.append((salt, max(start, 0), rng.randrange(BLOCK_SIZE)))
    elif kind == 11:
        changed["cache_salt"] = rng.choice([None, "", "a", "None", salt])
    elif media:
        which = rng.randrange(len(media))
        identifier, offset, length = media[which]
        if kind == 12:  # text, bytes, and types that are refused
            text = identifier.decode() if isinstance(identifier, bytes) else str(identifier)
            identifier = rng.choice([text, text.encode(), (text,), [text], 1, True, 1.0, None, b""])
        elif kind == 13:
            offset += rng.choice([-1, 1, BLOCK_SIZE])
        elif kind == 14:
            length += rng.choice([-1, 1, BLOCK_SIZE])
        elif kind == 15 and isinstance(identifier, str):
            identifier = identifier + str(offset)
        elif kind == 16:
            identifier, regions[at] = salt, (start, str(identifier))
        media[which] = (identifier, max(0, offset), max(0, length))
        if kind == 17:
            media.reverse()
    changed["regions"] = regions
    changed["media"] = media
    return changed
