"""Salts by region of a prompt: which of them a block's hash covers, and the checks of their form.

A request has them as `salt_regions`: None, or objects with `start` and `salt`, in the order of their starts.
The hash of a block covers each region that starts in it, with its offset. It covers earlier regions as well,
through its parent. So every block that a region touches is private, and so is every block after it.

The extra keys of such a request are unambiguous: different inputs never have equal bytes. For this, its
multimodal inputs are keyed with their length, and only the types are accepted that canonical CBOR keeps
apart: text for salts and adapters, text or bytes for identifiers.
"""

from collections.abc import Sequence
from typing import Any

from kv_pool.core.arguments import as_int, refuse_type
from kv_pool.errors import InvalidArgumentError

MAX_SALT_REGIONS = 256
"""The most regions of one request."""


def check_region(start: Any, salt: Any, least: int) -> int:
    """Check the start and the salt of a region. Return the start.

    Args:
        least: the smallest start that the regions before it permit.
    Raises:
        InvalidTypeError: the start is not an int, or the salt not a string.
        InvalidArgumentError: the start is too small, or the salt is empty.
    """
    if not isinstance(start, int):
        start = as_int("start", start)
    first: int = start
    if not isinstance(salt, str):
        refuse_type("salt", salt, "str")
    if not salt:
        raise InvalidArgumentError(
            "the salt of a region is empty. A block's hash covers all blocks before it, so tokens after a "
            "private region cannot be public; leave the region out, or end the prompt's public part earlier"
        )
    if first < least:
        raise InvalidArgumentError(
            f"a region starts at token {first}; it must start at {least} or later: salt regions do not "
            "overlap, and are listed in the order of their starts"
        )
    return first


def read_salt_regions(request: Any) -> list[tuple[int, str]]:
    """Return (start, salt) of each region of the request; [] if it has none.

    Also checks its other extra keys, which have to be unambiguous then.

    Raises:
        InvalidTypeError: a salt, an adapter's name or path is not a string, or an identifier neither a
            string nor bytes.
        InvalidArgumentError: the starts do not increase, a salt is empty, or there are too many regions.
    """
    found: list[tuple[int, str]] = []
    if not hasattr(request, "salt_regions"):
        return found
    regions: Any = request.salt_regions
    if not regions:
        return found
    if len(regions) > MAX_SALT_REGIONS:
        raise InvalidArgumentError(
            f"the request has {len(regions)} salt regions; at most {MAX_SALT_REGIONS} are possible"
        )
    least = 0
    for region in regions:
        start = check_region(region.start, region.salt, least)
        least = start + 1
        found.append((start, region.salt))
    salt: Any = request.cache_salt
    if salt is not None and not isinstance(salt, str):
        refuse_type("cache_salt", salt, "str or None")
    if salt is not None and not salt:
        raise InvalidArgumentError("cache_salt is empty, which is no salt; leave it out, or pass text")
    lora: Any = request.lora_request
    if lora:
        for name, value in (("lora_name", lora.lora_name), ("lora_path", lora.lora_path)):
            if not isinstance(value, str):
                refuse_type(f"{name} of a request with salt_regions", value, "str")
    features: Sequence[Any] = request.mm_features or ()
    for feature in features:
        identifier: Any = feature.identifier
        if not isinstance(identifier, (str, bytes)):
            refuse_type("identifier of a request with salt_regions", identifier, "str or bytes")
    return found
